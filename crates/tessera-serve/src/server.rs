//! The listening socket, its connections, and the threads of a server.

use std::fs::File;
use std::io::BufReader;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tessera::StopHandle;
use tessera_base::{Diagnostic, Diagnostics};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::{sleep, sleep_until, timeout};
use tokio_rustls::TlsAcceptor;
use tower_service::Service;

use crate::codes::{T1601, T1609, T1610};
use crate::lingering_stream::LingeringStream;
use crate::options::{ServeLimits, ServeOptions};
use crate::protocol::Refusal;
use crate::server_state::ServerState;
use crate::supervisor::{RunTemplate, run_streams};

/// Threads that serve connections. They encode no frames, so two carry hundreds of clients.
const SERVING_THREADS: usize = 2;
/// Longest time that connections get to send what waits when the server stops.
const CLOSING_TIME: Duration = Duration::from_secs(1);
/// Sockets beyond those of the clients, which have not said hello.
pub(crate) const SPARE_SOCKETS: usize = 32;
/// Refused connections that are read on at once, so that their clients see the answer.
const MAX_LINGERING_REFUSALS: usize = 32;
/// Most bytes of the header of a request.
const MAX_HEADER_BYTES: usize = 16 << 10;

/// A socket that listens, and what its connections speak.
pub(crate) struct Listening {
    listener: StdListener,
    pub(crate) address: SocketAddr,
    tls: Option<Arc<ServerConfig>>,
}

impl Listening {
    /// Opens the socket and reads the certificates.
    ///
    /// # Errors
    /// T1601 or T1609.
    pub(crate) fn open(options: &ServeOptions) -> Result<Listening, Diagnostic> {
        let tls = match &options.tls {
            Some((certificates, key)) => Some(Arc::new(read_certificates(certificates, key)?)),
            None => None,
        };
        let bind = || {
            let listener = StdListener::bind(options.listen)?;
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            Ok((listener, address))
        };
        let (listener, address) = bind().map_err(|e: std::io::Error| {
            Diagnostic::error(&T1601, format!("{}: {e}", options.listen))
                .with_hint("name another one with --listen ADDRESS:PORT; port 0 lets the system choose")
        })?;
        Ok(Listening { listener, address, tls })
    }

    /// Whether connections are encrypted.
    pub(crate) fn is_tls(&self) -> bool {
        self.tls.is_some()
    }
}

/// Serves until the stream has ended, which `stop` requests.
///
/// # Errors
/// What is wrong with the stream before its ranks were started, or T1601.
pub(crate) fn serve_until_stopped(
    listening: Listening,
    router: Router,
    server: &Arc<ServerState>,
    template: &RunTemplate,
    stop: &StopHandle,
) -> Result<(), Diagnostics> {
    let failed =
        |e: std::io::Error| vec![Diagnostic::error(&T1601, format!("the threads of the server: {e}"))];
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(SERVING_THREADS)
        .thread_name("serve")
        .enable_all()
        .build()
        .map_err(failed)?;
    let Listening { listener, tls, .. } = listening;
    let listener = runtime.block_on(async { TcpListener::from_std(listener) }).map_err(failed)?;
    runtime.spawn(accept_connections(listener, tls, router, Arc::clone(server)));
    runtime.spawn(pace_stream(Arc::clone(server)));
    runtime.spawn(pass_stop_on(Arc::clone(server), stop.clone()));
    let exporter = server.traces.as_ref().map(|traces| Arc::clone(traces.exporter()));
    let sending = exporter.clone().map(|exporter| runtime.spawn(async move { exporter.send_spans().await }));
    let ended = run_streams(server, template);
    let bye = Diagnostic::error(&T1610, "the server stops");
    server.end_clients(&Refusal::from_diagnostic(&bye));
    // The queues of the clients are sent while this waits.
    runtime.block_on(async { sleep(CLOSING_TIME / 4).await });
    if let (Some(exporter), Some(sending)) = (exporter, sending) {
        exporter.close();
        // A collector that does not answer now gets nothing more.
        let _ = runtime.block_on(async { timeout(CLOSING_TIME, sending).await });
    }
    runtime.shutdown_timeout(CLOSING_TIME);
    ended
}

/// Lets the leader request chunks when they may be.
async fn pace_stream(server: Arc<ServerState>) {
    loop {
        let next = tokio::task::block_in_place(|| server.tick());
        tokio::select! {
            () = sleep_until(next.into()) => {}
            () = server.pace_changed.notified() => {}
        }
    }
}

/// Passes requests to stop on to the stream. Each is passed on: the second one kills the ranks.
async fn pass_stop_on(server: Arc<ServerState>, stop: StopHandle) {
    let mut passed = 0;
    loop {
        sleep(Duration::from_millis(50)).await;
        while passed < stop.request_count() {
            server.stop();
            passed += 1;
        }
    }
}

async fn accept_connections(
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
    router: Router,
    server: Arc<ServerState>,
) {
    // A socket keeps its place for as long as it lasts.
    let ServeLimits { max_connections, max_clients, .. } = server.limits;
    let permits = Arc::new(Semaphore::new(max_connections + max_clients + SPARE_SOCKETS));
    let refusals = Arc::new(Semaphore::new(MAX_LINGERING_REFUSALS));
    let tls = tls.map(TlsAcceptor::from);
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                // No descriptors are left; some are closed soon.
                tracing::warn!("a connection was not accepted: {e}");
                sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else {
            let permit = Arc::clone(&refusals).try_acquire_owned().ok();
            tokio::spawn(refuse_connection(LingeringStream::new(stream, permit)));
            continue;
        };
        // Frames are sent when they are ready.
        let _ = stream.set_nodelay(true);
        let stream = LingeringStream::new(stream, Some(permit));
        let (router, tls, limit) = (router.clone(), tls.clone(), server.limits.handshake);
        tokio::spawn(async move {
            match tls {
                None => serve_connection(stream, router, limit).await,
                Some(tls) => {
                    if let Ok(Ok(stream)) = timeout(limit, tls.accept(stream)).await {
                        serve_connection(stream, router, limit).await;
                    }
                }
            }
        });
    }
}

async fn serve_connection<S>(stream: S, router: Router, limit: Duration)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let mut router = router.clone();
        async move { router.call(request.map(Body::new)).await }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limit).max_buf_size(MAX_HEADER_BYTES);
    // A client that breaks off or talks nonsense is no error of the server.
    let _ = builder.serve_connection(TokioIo::new(stream), service).with_upgrades().await;
}

/// Tells a client in one short answer that there are too many.
async fn refuse_connection(mut stream: LingeringStream) {
    const ANSWER: &[u8] =
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\ncontent-length: 32\r\n\
                            connection: close\r\nretry-after: 5\r\n\r\nT1605: too many connections now\n";
    let _ = timeout(Duration::from_secs(1), stream.write_all(ANSWER)).await;
}

/// Reads a certificate chain and its key.
fn read_certificates(certificates: &Path, key: &Path) -> Result<ServerConfig, Diagnostic> {
    let wrong = |path: &Path, what: String| Diagnostic::error(&T1609, format!("{}: {what}", path.display()));
    let open = |path: &Path| File::open(path).map(BufReader::new).map_err(|e| wrong(path, e.to_string()));
    let chain: Result<Vec<_>, _> = CertificateDer::pem_reader_iter(open(certificates)?).collect();
    let chain = chain.map_err(|e| wrong(certificates, e.to_string()))?;
    let secret = PrivateKeyDer::from_pem_reader(open(key)?).map_err(|e| wrong(key, e.to_string()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|config| config.with_no_client_auth().with_single_cert(chain, secret));
    config.map_err(|e| wrong(certificates, e.to_string()))
}
