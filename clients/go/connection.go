// Package distop connects to a distop service and calls it. The messages and stubs are in distop.dev/go/distop/v1.
package distop

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
)

const (
	defaultPort = "7781"
	// The largest message, in both directions.
	maxMessageBytes = 64 << 20
)

// Options of a connection. The files are PEM; they are used with grpcs:// only.
type Options struct {
	// Authorities that sign the service's certificate; without a file, the system's.
	CAFile string
	// The caller's certificate and its key, for a service with client-ca.
	CertFile, KeyFile string
	// A bearer token.
	Token string
}

// Connect returns a connection to the service at grpc://host:port or, with TLS, grpcs://host:port. It connects at the
// first call. A token is sent as plain text to this machine only.
func Connect(serviceURL string, options Options) (*grpc.ClientConn, error) {
	parsed, err := url.Parse(serviceURL)
	if err != nil || (parsed.Scheme != "grpc" && parsed.Scheme != "grpcs") || parsed.Hostname() == "" ||
		parsed.Path != "" || parsed.RawQuery != "" || parsed.User != nil {
		return nil, fmt.Errorf("%q is not the URL of a service: grpc://host:port, or grpcs:// with TLS", serviceURL)
	}
	port := parsed.Port()
	if port == "" {
		port = defaultPort
	}
	secure := parsed.Scheme == "grpcs"
	transport := insecure.NewCredentials()
	if secure {
		if transport, err = tlsCredentials(options); err != nil {
			return nil, err
		}
	}
	dial := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithDisableRetry(), // a call that may have had an effect is repeated by Retry only
		grpc.WithNoProxy(),
	}
	if options.Token != "" {
		if !secure && !isLoopback(parsed.Hostname()) {
			return nil, fmt.Errorf("a token for %s would be sent as plain text: use grpcs://", parsed.Host)
		}
		dial = append(dial, grpc.WithPerRPCCredentials(bearer{token: options.Token, secure: secure}))
	}
	return grpc.NewClient(net.JoinHostPort(parsed.Hostname(), port), dial...)
}

func tlsCredentials(options Options) (credentials.TransportCredentials, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if options.CAFile != "" {
		pem, err := os.ReadFile(options.CAFile)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s has no certificate in PEM", options.CAFile)
		}
	}
	if options.CertFile != "" || options.KeyFile != "" {
		if options.CertFile == "" || options.KeyFile == "" {
			return nil, errors.New("a certificate and its key have to be given together")
		}
		// Read at each handshake, because the files may be replaced.
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(options.CertFile, options.KeyFile)
			return &pair, err
		}
	}
	return credentials.NewTLS(config), nil
}

func isLoopback(host string) bool {
	address := net.ParseIP(host)
	return host == "localhost" || (address != nil && address.IsLoopback())
}

type bearer struct {
	token  string
	secure bool
}

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + b.token}, nil
}

func (b bearer) RequireTransportSecurity() bool { return b.secure }
