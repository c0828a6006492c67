package journal

import (
	"context"
	"fmt"
)

// LimitPages makes the database full at n pages: SQLite then answers every
// write with the error it gives when the disk is full.
func (j *Journal) LimitPages(ctx context.Context, n int) error {
	var got int
	return j.w.conn.QueryRowContext(ctx, fmt.Sprintf(`PRAGMA max_page_count = %d`, n)).Scan(&got)
}

// Pages returns how many pages the database has.
func (j *Journal) Pages(ctx context.Context) (n int, err error) {
	err = j.w.conn.QueryRowContext(ctx, `PRAGMA page_count`).Scan(&n)
	return n, err
}

// SpillSlots is how many denials the spill file holds.
const SpillSlots = spillSlots
