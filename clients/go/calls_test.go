package distop

import (
	"context"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

func refused(code codes.Code, reason string, retry bool) error {
	found := status.New(code, "refused")
	found, _ = found.WithDetails(&errdetails.ErrorInfo{Reason: reason, Domain: "distop"})
	if retry {
		found, _ = found.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(time.Millisecond)})
	}
	return found.Err()
}

func TestRetryRepeatsWhatMayBeRepeated(t *testing.T) {
	for _, one := range []struct {
		err   error
		calls int
	}{
		{refused(codes.Unavailable, "EtcdUnavailable", true), 2},
		{refused(codes.Unavailable, "ServiceUnavailable", true), 2},
		{refused(codes.ResourceExhausted, "LimitExceeded", true), 2},
		{refused(codes.Unknown, "OutcomeUnknown", true), 2},
		{status.Error(codes.Unavailable, "no connection"), 2},
		{refused(codes.InvalidArgument, "InvalidArgument", false), 1},
		{refused(codes.DeadlineExceeded, "WaitTimeout", false), 1},
	} {
		calls := 0
		err := Retry(context.Background(), func(context.Context) error {
			if calls++; calls == 1 {
				return one.err
			}
			return nil
		})
		if calls != one.calls || (err == nil) != (one.calls == 2) {
			t.Errorf("%v: %d calls, %v", one.err, calls, err)
		}
	}
}

func TestRetryEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	err := Retry(ctx, func(context.Context) error {
		cancel()
		return refused(codes.Unavailable, "EtcdUnavailable", true)
	})
	if Reason(err) != "EtcdUnavailable" {
		t.Error(err)
	}
}

func TestATokenIsNotSentAsPlainText(t *testing.T) {
	if _, err := Connect("grpc://lake.example:7781", Options{Token: "secret"}); err == nil {
		t.Error("accepted")
	}
	for _, url := range []string{"http://a", "grpc://", "grpc://a/b", "grpc://u@a"} {
		if _, err := Connect(url, Options{}); err == nil {
			t.Error(url)
		}
	}
	for _, url := range []string{"grpc://localhost", "grpc://[::1]:1", "grpcs://lake.example"} {
		connection, err := Connect(url, Options{Token: "secret"})
		if err != nil {
			t.Fatal(err)
		}
		connection.Close()
	}
}

func TestNumbersKeepTheirDigits(t *testing.T) {
	message, err := JSON(map[string]any{"n": int64(1) << 62})
	if err != nil {
		t.Fatal(err)
	}
	var found any
	if err := Decode(message, &found); err != nil {
		t.Fatal(err)
	}
	again, _ := JSON(found)
	if again.GetText() != message.GetText() {
		t.Error(again)
	}
}
