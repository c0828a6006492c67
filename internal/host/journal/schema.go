package journal

// schema is the journal's part of the state database. Entries are only ever
// inserted; ledger rows go from started to finished once.
var schema = []string{`
CREATE TABLE lease (
	one    INTEGER PRIMARY KEY CHECK (one = 1),
	epoch  INTEGER NOT NULL,
	holder TEXT NOT NULL
) STRICT;
INSERT INTO lease (one, epoch, holder) VALUES (1, 0, '');

CREATE TABLE journal (
	seq     INTEGER PRIMARY KEY,
	at      INTEGER NOT NULL,
	epoch   INTEGER NOT NULL,
	change  TEXT NOT NULL,
	kind    TEXT NOT NULL,
	action  TEXT NOT NULL,
	key     TEXT NOT NULL,
	request TEXT NOT NULL,
	body    BLOB NOT NULL
) STRICT;
CREATE INDEX journal_change ON journal (change, seq);

CREATE TABLE ledger (
	key        TEXT PRIMARY KEY,
	change     TEXT NOT NULL,
	run        TEXT NOT NULL,
	grant_id   TEXT NOT NULL,
	verb       TEXT NOT NULL,
	action     TEXT NOT NULL,
	decision   TEXT NOT NULL,
	request    TEXT NOT NULL,
	state      TEXT NOT NULL CHECK (state IN ('started', 'finished')),
	status     TEXT NOT NULL,
	result     TEXT NOT NULL,
	outcome    BLOB NOT NULL,
	start_seq  INTEGER NOT NULL,
	finish_seq INTEGER NOT NULL,
	r_actions  INTEGER NOT NULL,
	r_output   INTEGER NOT NULL,
	r_tokens   INTEGER NOT NULL,
	r_wall     INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX ledger_run ON ledger (run, verb);
CREATE INDEX ledger_started ON ledger (grant_id) WHERE state = 'started';

CREATE TABLE spent (
	grant_id TEXT PRIMARY KEY,
	actions  INTEGER NOT NULL,
	output   INTEGER NOT NULL,
	tokens   INTEGER NOT NULL,
	wall     INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE run_fact (
	run     TEXT PRIMARY KEY,
	denials INTEGER NOT NULL,
	tainted INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE answer (
	digest TEXT PRIMARY KEY,
	body   BLOB NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE revoked (
	scope TEXT NOT NULL CHECK (scope IN ('run', 'change', 'grant')),
	id    TEXT NOT NULL,
	PRIMARY KEY (scope, id)
) STRICT, WITHOUT ROWID;

CREATE TABLE spill_drained (
	generation INTEGER PRIMARY KEY
) STRICT;
`}
