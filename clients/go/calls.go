package distop

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	distopv1 "distop.dev/go/distop/v1"
)

const (
	firstPause   = 100 * time.Millisecond
	longestPause = 10 * time.Second
	callLimit    = 60 * time.Second
)

// Retry makes a call until it succeeds, fails for good, or ctx ends. It repeats calls that the service answers with
// RetryInfo, and those that get no answer. So the call has to be one that can be repeated: a read, or a write with a
// request id. Each call has 60 seconds.
func Retry(ctx context.Context, call func(context.Context) error) error {
	pause := firstPause
	for {
		limited, cancel := context.WithTimeout(ctx, callLimit)
		err := call(limited)
		cancel()
		delay, again := retryDelay(err)
		if !again || ctx.Err() != nil {
			return err
		}
		if wait(ctx, max(delay, pause)) != nil {
			return err
		}
		pause = min(2*pause, longestPause)
	}
}

// wait returns after a delay, with up to a quarter more at random so that many callers do not come back at once, or
// with the error of ctx when it ends.
func wait(ctx context.Context, delay time.Duration) error {
	timer := time.NewTimer(delay + rand.N(delay/4+1))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// retryDelay says whether a failed call may be repeated, and after which time at the earliest.
func retryDelay(err error) (time.Duration, bool) {
	if err == nil {
		return 0, false
	}
	found := status.Convert(err)
	for _, detail := range found.Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			return min(max(info.GetRetryDelay().AsDuration(), 0), longestPause), true
		}
	}
	// DeadlineExceeded: of the one call. WaitTimeout of the service has a reason, and is final.
	return 0, found.Code() == codes.Unavailable || (found.Code() == codes.DeadlineExceeded && Reason(err) == "")
}

// Reason returns the name of distop's exception that a call failed with (docs/reference/service.md), or "".
func Reason(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.GetDomain() == "distop" {
			return info.GetReason()
		}
	}
	return ""
}

// JSON returns a value as a message.
func JSON(value any) (*distopv1.Json, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	return &distopv1.Json{Text: string(text)}, nil
}

// Decode reads the value of a message. Numbers in a target of type any become json.Number, which loses no digits.
func Decode(message *distopv1.Json, target any) error {
	decoder := json.NewDecoder(bytes.NewReader([]byte(message.GetText())))
	decoder.UseNumber()
	return decoder.Decode(target)
}

// Wait follows an operation until it has ended and returns its last status. changed, unless nil, gets each status. A
// stream that breaks is opened again.
func Wait(
	ctx context.Context, operations distopv1.OperationsClient, op string, changed func(*distopv1.Operation),
) (*distopv1.Operation, error) {
	pause := firstPause
	for {
		last, err := watch(ctx, operations, op, func(one *distopv1.Operation) {
			pause = firstPause
			if changed != nil {
				changed(one)
			}
		})
		if err == nil {
			return last, nil
		}
		delay, again := retryDelay(err)
		if !again || ctx.Err() != nil || wait(ctx, max(delay, pause)) != nil {
			return nil, err
		}
		pause = min(2*pause, longestPause)
	}
}

func watch(
	ctx context.Context, operations distopv1.OperationsClient, op string, changed func(*distopv1.Operation),
) (*distopv1.Operation, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := operations.Watch(ctx, &distopv1.WatchRequest{Op: op})
	if err != nil {
		return nil, err
	}
	var last *distopv1.Operation
	for {
		response, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF) && last != nil:
			return last, nil
		case errors.Is(err, io.EOF):
			return nil, status.Error(codes.Unavailable, "the stream ended before a status")
		case err != nil:
			return nil, err
		}
		last = response.GetOperation()
		changed(last)
	}
}
