package digest

import "strconv"

// Writer writes the canonical form of documents whose texts need no care:
// printable ASCII without quotes and backslashes, which stands for itself. Its
// users name the members of each object in order. It never writes what is not
// canonical for another reason: a text that needs care makes it Odd, and then
// Canonical has to do the whole. The zero value is ready.
type Writer struct {
	b   []byte
	odd bool
}

// NewWriter returns a Writer with room for size bytes.
func NewWriter(size int) *Writer { return &Writer{b: make([]byte, 0, size)} }

// Bytes returns what was written, and false if a text needs care.
func (w *Writer) Bytes() ([]byte, bool) { return w.b, !w.odd }

// Open and Close begin and end an object.
func (w *Writer) Open() { w.b = append(w.b, '{') }

// Close ends the object that Open began.
func (w *Writer) Close() { w.b = append(w.b, '}') }

// Name begins a member of the open object.
func (w *Writer) Name(n string) {
	if last := w.b[len(w.b)-1]; last != '{' {
		w.b = append(w.b, ',')
	}
	w.b = append(append(append(w.b, '"'), n...), '"', ':')
}

// Raw writes a value that is in its canonical form.
func (w *Writer) Raw(json []byte) { w.b = append(w.b, json...) }

// Text writes a member that is a text.
func (w *Writer) Text(n, s string) {
	w.Name(n)
	w.text(s)
}

// Texts writes a member that is a list of texts.
func (w *Writer) Texts(n string, list []string) {
	w.Name(n)
	w.List(len(list), func(i int) { w.text(list[i]) })
}

// List writes a list of n values, each by the function.
func (w *Writer) List(n int, value func(i int)) {
	w.b = append(w.b, '[')
	for i := range n {
		if i > 0 {
			w.b = append(w.b, ',')
		}
		value(i)
	}
	w.b = append(w.b, ']')
}

// Flag writes a member that is true or false.
func (w *Writer) Flag(n string, v bool) {
	w.Name(n)
	w.b = strconv.AppendBool(w.b, v)
}

// Number writes a member that is a whole number; one beyond ±2^53 makes the
// Writer odd.
func (w *Writer) Number(n string, v int64) {
	w.odd = w.odd || v > maxExact || v < -maxExact
	w.Name(n)
	w.b = strconv.AppendInt(w.b, v, 10)
}

func (w *Writer) text(s string) {
	for i := range len(s) {
		if c := s[i]; c > '~' || !plain(c) {
			w.odd = true
			return
		}
	}
	w.b = append(append(append(w.b, '"'), s...), '"')
}
