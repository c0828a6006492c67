package kinds

import (
	"errors"
	"sync"

	"buf.build/go/protovalidate"
	"google.golang.org/protobuf/proto"
)

type violation struct{ field, rule, text string }

// validator is built once: it compiles the rules of the generated messages.
var validator = sync.OnceValues(func() (protovalidate.Validator, error) { return protovalidate.New() })

// violations returns the declared bounds that m breaks; a validator that does
// not work is a violation too.
func violations(m proto.Message) (out []violation) {
	v, err := validator()
	if err == nil {
		err = v.Validate(m)
	}
	if err == nil {
		return nil
	}
	var broken *protovalidate.ValidationError
	if !errors.As(err, &broken) {
		return []violation{{rule: "bounds", text: err.Error()}}
	}
	for _, b := range broken.Violations {
		text := b.Proto.GetMessage()
		if text == "" {
			text = "breaks the rule " + b.Proto.GetRuleId()
		}
		out = append(out, violation{protovalidate.FieldPathString(b.Proto.GetField()), b.Proto.GetRuleId(), text})
	}
	return out
}
