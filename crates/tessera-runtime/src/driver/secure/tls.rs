//! TLS 1.3 on both sides by certificates of the run's own authority.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::PollFlags;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    ClientConfig, ClientConnection, Connection, DigitallySignedStruct, RootCertStore, ServerConfig,
    ServerConnection, SignatureScheme, version,
};
use tessera_base::Diagnostic;

use super::{Side, ready};
use crate::driver::stream::Stream;
use crate::tripwire::T0756;

/// A rank's certificate and the authority that it believes.
#[derive(Debug, Clone)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Tls {
    /// From the contents of PEM files: this rank's certificate with what leads to the authority, its key, and the
    /// certificates of the authority. Every certificate of the authority belongs to the run, whatever name is in it.
    ///
    /// # Errors
    /// T0756 naming the file that does not do.
    pub fn new(certificate: &[u8], key: &[u8], authority: &[u8]) -> std::result::Result<Tls, Diagnostic> {
        let refuse = |file: &str, why: String| {
            Diagnostic::error(&T0756, format!("the {file} cannot be used: {why}"))
                .hint("PEM files are needed, as openssl writes them")
        };
        let many =
            |file: &str, pem: &[u8]| -> std::result::Result<Vec<CertificateDer<'static>>, Diagnostic> {
                let read: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
                match read {
                    Ok(list) if !list.is_empty() => Ok(list),
                    Ok(_) => Err(refuse(file, "it holds no certificate".into())),
                    Err(e) => Err(refuse(file, e.to_string())),
                }
            };
        let chain = many("certificate", certificate)?;
        let mut roots = RootCertStore::empty();
        for root in many("certificate of the authority", authority)? {
            roots.add(root).map_err(|e| refuse("certificate of the authority", e.to_string()))?;
        }
        let roots = Arc::new(roots);
        let key = || PrivateKeyDer::from_pem_slice(key).map_err(|e| refuse("key", e.to_string()));
        let provider = Arc::new(ring::default_provider());
        let together = |e: rustls::Error| refuse("key with its certificate", e.to_string());
        let only = &[&version::TLS13];
        let authority = Arc::new(Authority { roots: Arc::clone(&roots), provider: Arc::clone(&provider) });
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(only)
            .map_err(together)?
            .dangerous()
            .with_custom_certificate_verifier(authority)
            .with_client_auth_cert(chain.clone(), key()?)
            .map_err(together)?;
        client.enable_sni = false;
        client.resumption = rustls::client::Resumption::disabled();
        let peers = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(|e| refuse("certificate of the authority", e.to_string()))?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(only)
            .map_err(together)?
            .with_client_cert_verifier(peers)
            .with_single_cert(chain, key()?)
            .map_err(together)?;
        server.send_tls13_tickets = 0;
        Ok(Tls { client: Arc::new(client), server: Arc::new(server) })
    }

    pub(super) fn over(&self, socket: TcpStream, side: Side) -> Result<Session> {
        let connection = match side {
            Side::Connects => {
                let name = ServerName::try_from("tessera").map_err(Error::other)?;
                let client = ClientConnection::new(Arc::clone(&self.client), name).map_err(Error::other)?;
                Connection::Client(client)
            }
            Side::Accepts => {
                let server = ServerConnection::new(Arc::clone(&self.server)).map_err(Error::other)?;
                Connection::Server(server)
            }
        };
        Ok(Session { connection, socket, full: false })
    }
}

/// A peer's certificate must come from the authority; ranks have no names that could be compared with an address.
#[derive(Debug)]
struct Authority {
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Authority {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&certificate, &self.roots, intermediates, now, algorithms)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("only TLS 1.3 is spoken here".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// A TLS session over a socket that never blocks.
pub(super) struct Session {
    connection: Connection,
    socket: TcpStream,
    /// Whether the last read filled all it was given, so that more may lie here.
    full: bool,
}

impl Session {
    pub(super) fn shake_hands(&mut self, until: Instant) -> Result<()> {
        while self.connection.is_handshaking() || self.connection.wants_write() {
            match self.flush() {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    ready(self.socket.as_fd(), PollFlags::OUT, until)?;
                    continue;
                }
                Err(e) => return Err(e),
            }
            if !self.connection.is_handshaking() {
                break;
            }
            match self.take_in() {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    ready(self.socket.as_fd(), PollFlags::IN, until)?;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// A secret of this session and of no other.
    pub(super) fn bound(&self) -> Result<[u8; 32]> {
        let label = b"EXPERIMENTAL-tessera-run";
        self.connection.export_keying_material([0; 32], label, None).map_err(Error::other)
    }

    /// Takes bytes from the socket into the session; 0 at their end.
    fn take_in(&mut self) -> Result<usize> {
        let n = self.connection.read_tls(&mut self.socket)?;
        if let Err(e) = self.connection.process_new_packets() {
            // The peer is told why, as far as TLS tells anybody.
            let _ = self.connection.write_tls(&mut self.socket);
            return Err(Error::new(ErrorKind::InvalidData, e));
        }
        Ok(n)
    }
}

impl Stream for Session {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        loop {
            match self.connection.reader().read(into) {
                Ok(n) => {
                    self.full = n > 0 && n == into.len();
                    return Ok(n);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
            self.full = false;
            self.take_in()?;
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let taken = self.connection.writer().write(bytes)?;
        match self.flush() {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
        if taken > 0 || bytes.is_empty() {
            return Ok(taken);
        }
        match self.connection.writer().write(bytes)? {
            0 => Err(ErrorKind::WouldBlock.into()),
            n => Ok(n),
        }
    }

    fn flush(&mut self) -> Result<()> {
        while self.connection.wants_write() {
            self.connection.write_tls(&mut self.socket)?;
        }
        Ok(())
    }

    fn holds_input(&self) -> bool {
        self.full
    }

    fn wants_write(&self) -> bool {
        self.connection.wants_write()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
