package files

import (
	"fmt"
	"strings"

	ticketingv1 "github.com/numinance/numinance/gen/numinance/ports/ticketing/v1"
)

var categories = map[string]ticketingv1.StateCategory{
	"todo":        ticketingv1.StateCategory_STATE_CATEGORY_TODO,
	"in_progress": ticketingv1.StateCategory_STATE_CATEGORY_IN_PROGRESS,
	"done":        ticketingv1.StateCategory_STATE_CATEGORY_DONE,
	"cancelled":   ticketingv1.StateCategory_STATE_CATEGORY_CANCELLED,
}

// defaultStates are used where the configuration names none.
var defaultStates = []State{
	{"todo", "todo"}, {"open", "todo"}, {"new", "todo"}, {"backlog", "todo"},
	{"in progress", "in_progress"}, {"in_progress", "in_progress"}, {"doing", "in_progress"}, {"in review", "in_progress"},
	{"done", "done"}, {"closed", "done"}, {"resolved", "done"},
	{"cancelled", "cancelled"}, {"canceled", "cancelled"}, {"wontfix", "cancelled"},
}

// workflow knows the category of each state and the state for each category.
type workflow struct {
	category map[string]ticketingv1.StateCategory // by lower-case name
	state    map[ticketingv1.StateCategory]string
}

func newWorkflow(states []State) (workflow, error) {
	if len(states) == 0 {
		states = defaultStates
	}
	w := workflow{category: map[string]ticketingv1.StateCategory{}, state: map[ticketingv1.StateCategory]string{}}
	for _, s := range states {
		name, category := strings.ToLower(s.Name), categories[s.Category]
		switch {
		case category == 0:
			return workflow{}, fmt.Errorf("state %q: category %q is none of todo, in_progress, done, cancelled", s.Name, s.Category)
		case name == "" || len(name) > 128 || strings.ContainsFunc(name, isControl):
			return workflow{}, fmt.Errorf("state %q: 1 to 128 bytes on one line", s.Name)
		case w.category[name] != 0:
			return workflow{}, fmt.Errorf("state %q is there twice", s.Name)
		}
		w.category[name] = category
		if w.state[category] == "" {
			w.state[category] = s.Name
		}
	}
	return w, nil
}
