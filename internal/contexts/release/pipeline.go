package release

import (
	"context"
	"fmt"
	"time"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"

	ciexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/ciexecutor/v1"
)

// Poll paces GetOperation: the first question after First, each pause Factor
// times longer up to Most, and no more than Limit in all.
type Poll struct {
	First, Most, Limit time.Duration
	Factor             float64
}

// DefaultPoll suits pipelines of seconds as well as of an hour.
func DefaultPoll() Poll {
	return Poll{First: 200 * time.Millisecond, Most: 5 * time.Second, Limit: time.Hour, Factor: 1.5}
}

// cancelTime bounds the CancelOperation of a run that is given up.
const cancelTime = 10 * time.Second

// PipelineIn is what runs on what.
type PipelineIn struct {
	Pipeline, Repository, Revision string
}

// Run starts the customer's pipeline on the revision and waits for its end. Its
// result is a fact about the pipeline, never an approval (P-118). If ctx ends
// or the limit passes, the run is cancelled.
func (c *Context) Run(ctx context.Context, in PipelineIn) (change.PipelineRun, error) {
	ci := c.ci("")
	started, err := ci.StartOperation(ctx, &ciexecutorv1.StartOperationRequest{
		Pipeline: in.Pipeline, Repository: in.Repository, Revision: in.Revision,
	})
	if err != nil {
		return change.PipelineRun{}, fmt.Errorf("start pipeline %s: %w", in.Pipeline, err)
	}
	op := started.GetOperation()
	name := op.GetName()
	limit := time.NewTimer(c.Poll.Limit)
	defer limit.Stop()
	polls := c.ci("poll")
	for pause := c.Poll.First; !ended(op.GetState()); pause = min(time.Duration(float64(pause)*c.Poll.Factor), c.Poll.Most) {
		next := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			next.Stop()
			return change.PipelineRun{}, c.giveUp(ctx, in.Pipeline, name, context.Cause(ctx))
		case <-limit.C:
			next.Stop()
			return change.PipelineRun{}, c.giveUp(ctx, in.Pipeline, name, &change.Fault{
				Class: change.Unverified, Reason: fmt.Sprintf("pipeline %s did not end in %s", in.Pipeline, c.Poll.Limit)})
		case <-next.C:
		}
		got, err := polls.GetOperation(ctx, &ciexecutorv1.GetOperationRequest{Pipeline: in.Pipeline, Operation: name})
		if err != nil {
			return change.PipelineRun{}, c.giveUp(ctx, in.Pipeline, name, fmt.Errorf("read run %s: %w", name, err))
		}
		op = got.GetOperation()
	}
	if op.GetRevision() != in.Revision {
		return change.PipelineRun{}, &change.Fault{Class: change.Unverified, Reason: fmt.Sprintf("pipeline %s ran on %s, not on %s", in.Pipeline, op.GetRevision(), in.Revision)}
	}
	log, err := c.ci("log").GetLogReference(ctx, &ciexecutorv1.GetLogReferenceRequest{Pipeline: in.Pipeline, Operation: name})
	if err != nil {
		return change.PipelineRun{}, fmt.Errorf("read the log of run %s: %w", name, err)
	}
	return change.PipelineRun{
		ID: name, Log: digest.Digest(log.GetLog().GetDigest()),
		Succeeded: op.GetState() == ciexecutorv1.OperationState_OPERATION_STATE_SUCCEEDED,
	}, nil
}

// ci is the port under the release-pipeline identity. After a crash the polls
// are recorded ones and the moment to give up may be another, so each part of
// the step has keys of its own.
func (c *Context) ci(part string) ciexecutorv1.CiExecutorServiceClient {
	return ciexecutorv1.NewCiExecutorServiceClient(c.connect(identity.KindReleasePipeline, part))
}

func ended(s ciexecutorv1.OperationState) bool {
	switch s {
	case ciexecutorv1.OperationState_OPERATION_STATE_QUEUED, ciexecutorv1.OperationState_OPERATION_STATE_RUNNING:
		return false
	default:
		return true
	}
}

// giveUp cancels the run, so that nothing of a Change goes on in the
// customer's CI, and returns why it was given up.
func (c *Context) giveUp(ctx context.Context, pipeline, name string, why error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelTime)
	defer cancel()
	if _, err := c.ci("cancel").CancelOperation(ctx, &ciexecutorv1.CancelOperationRequest{Pipeline: pipeline, Operation: name}); err != nil {
		return fmt.Errorf("run %s of pipeline %s may still go on (%v): %w", name, pipeline, err, why)
	}
	return fmt.Errorf("run %s of pipeline %s was cancelled: %w", name, pipeline, why)
}
