package files

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// A segment is one file with the consecutive records of one append:
//
//	numinance-evidence-segment 1
//	<change id> <first sequence> <count>
//	<length in bytes>
//	<the record's bytes>
//	…
//	sha256:<64 hex digits over everything before this line>
//
// Lengths frame the records, so that any bytes can be kept; the lines around
// them let a person read a segment with nothing but a pager.
const segmentMagic = "numinance-evidence-segment 1\n"

// errDamaged says that a segment is not what was written.
var errDamaged = errors.New("segment is damaged")

// encodeSegment returns the file of the given records.
func encodeSegment(change string, first uint64, records [][]byte) []byte {
	var b bytes.Buffer
	b.WriteString(segmentMagic)
	fmt.Fprintf(&b, "%s %d %d\n", change, first, len(records))
	for _, r := range records {
		fmt.Fprintf(&b, "%d\n", len(r))
		b.Write(r)
		b.WriteByte('\n')
	}
	sum := sha256.Sum256(b.Bytes())
	fmt.Fprintf(&b, "sha256:%s\n", hex.EncodeToString(sum[:]))
	return b.Bytes()
}

// decodeSegment returns the records of a file that must be the segment of
// change beginning at first. Any difference is errDamaged.
func decodeSegment(file []byte, change string, first uint64) ([][]byte, error) {
	const sumLine = len("sha256:") + 2*sha256.Size + 1
	if len(file) < len(segmentMagic)+sumLine {
		return nil, fmt.Errorf("%w: %d bytes", errDamaged, len(file))
	}
	content, trailer := file[:len(file)-sumLine], string(file[len(file)-sumLine:])
	sum := sha256.Sum256(content)
	if trailer != "sha256:"+hex.EncodeToString(sum[:])+"\n" {
		return nil, fmt.Errorf("%w: checksum", errDamaged)
	}
	rest, ok := bytes.CutPrefix(content, []byte(segmentMagic))
	if !ok {
		return nil, fmt.Errorf("%w: not a segment", errDamaged)
	}
	r := bufio.NewReader(bytes.NewReader(rest))
	line, err := r.ReadString('\n')
	if err != nil {
		return nil, fmt.Errorf("%w: no header", errDamaged)
	}
	fields := strings.Fields(line)
	if len(fields) != 3 || fields[0] != change || fields[1] != strconv.FormatUint(first, 10) {
		return nil, fmt.Errorf("%w: header %q, want %s from %d", errDamaged, line, change, first)
	}
	count, err := strconv.Atoi(fields[2])
	if err != nil || count < 1 || count > maxBatch {
		return nil, fmt.Errorf("%w: %q records", errDamaged, fields[2])
	}
	records := make([][]byte, count)
	for i := range records {
		if line, err = r.ReadString('\n'); err != nil {
			return nil, fmt.Errorf("%w: record %d is cut", errDamaged, first+uint64(i))
		}
		n, err := strconv.Atoi(strings.TrimSuffix(line, "\n"))
		if err != nil || n < 1 || n > maxRecord {
			return nil, fmt.Errorf("%w: record %d has length %q", errDamaged, first+uint64(i), line)
		}
		buf := make([]byte, n+1)
		if _, err := io.ReadFull(r, buf); err != nil || buf[n] != '\n' {
			return nil, fmt.Errorf("%w: record %d is cut", errDamaged, first+uint64(i))
		}
		records[i] = buf[:n:n]
	}
	if _, err := r.ReadByte(); err == nil {
		return nil, fmt.Errorf("%w: something follows the last record", errDamaged)
	}
	return records, nil
}
