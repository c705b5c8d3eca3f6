// Start an operation of a distop service, watch it, and print its report.
//
//	go run ./examples/start -service grpc://127.0.0.1:7781 -type noop -table orders -arg '{"jobs": 3}'
//
// A bearer token is read from DISTOP_TOKEN. The report goes to standard output, everything else to standard error. Exit
// codes: 0 success, 1 the operation failed, 2 the call failed, 6 the time is up.
package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	distop "distop.dev/go"
	distopv1 "distop.dev/go/distop/v1"
)

func main() {
	service := flag.String("service", "grpc://127.0.0.1:7781", "the service's `URL`; grpcs:// with TLS")
	ca := flag.String("ca", "", "PEM `file` of the authorities that sign the service's certificate")
	cert := flag.String("cert", "", "PEM `file` of the caller's certificate")
	key := flag.String("key", "", "PEM `file` of its key")
	kind := flag.String("type", "noop", "the operation's `type`")
	table := flag.String("table", "@cluster", "the `table`")
	arg := flag.String("arg", "{}", "the argument, as `JSON`")
	requestID := flag.String("request-id", "", "a repeated start with this `id` finds the first one (default: random)")
	limit := flag.Duration("timeout", 10*time.Minute, "the longest time to wait for the end")
	flag.Parse()

	options := distop.Options{CAFile: *ca, CertFile: *cert, KeyFile: *key, Token: os.Getenv("DISTOP_TOKEN")}
	connection, err := distop.Connect(*service, options)
	if err != nil {
		fail(err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), *limit)
	defer cancel()
	operations := distopv1.NewOperationsClient(connection)

	argument, err := distop.JSON(json.RawMessage(*arg))
	if err != nil {
		fail(fmt.Errorf("the argument: %w", err))
	}
	id := *requestID
	if id == "" {
		id = rand.Text()
	}
	// The request id makes the start one that can be repeated: however often it is sent, one operation starts.
	var started *distopv1.StartResponse
	err = distop.Retry(ctx, func(ctx context.Context) (err error) {
		started, err = operations.Start(ctx, &distopv1.StartRequest{
			Type: *kind, Table: *table, Arg: argument, Options: &distopv1.StartOptions{RequestId: &id},
		})
		return err
	})
	if err != nil {
		fail(err)
	}
	fmt.Fprintf(os.Stderr, "%s (already started: %t)\n", started.GetOp(), started.GetAlreadyStarted())

	ended, err := distop.Wait(ctx, operations, started.GetOp(), func(now *distopv1.Operation) {
		fmt.Fprintf(os.Stderr, "%s: %.0f %% of the jobs have ended\n", now.GetState(), 100*now.GetProgress())
	})
	if err != nil {
		fail(err)
	}
	var report *distopv1.GetReportResponse
	err = distop.Retry(ctx, func(ctx context.Context) (err error) {
		report, err = operations.GetReport(ctx, &distopv1.GetReportRequest{Op: started.GetOp()})
		return err
	})
	if err != nil {
		fail(err)
	}
	// The report depends on the type. The record has the counts of jobs, the errors, and the report, too.
	fmt.Println(report.GetRecord().GetText())
	if ended.GetState() != "success" {
		os.Exit(1)
	}
}

// fail reports an error and exits.
func fail(err error) {
	fmt.Fprintln(os.Stderr, "start:", err)
	if status.Code(err) == codes.DeadlineExceeded {
		os.Exit(6)
	}
	os.Exit(2)
}
