//! TLS 1.3 with certificates on both sides, issued by the run's own authority.

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

use super::{HandshakeSide, wait_ready};
use crate::codes::T0756;
use crate::driver::byte_stream::ByteStream;

/// A rank's certificate and the authority that it trusts.
#[derive(Debug, Clone)]
pub struct TlsConfig {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl TlsConfig {
    /// Builds the configuration from the contents of PEM files: this rank's certificate with the
    /// chain to the authority, its key, and the certificates of the authority. Every certificate of
    /// the authority belongs to the run, whatever its name.
    ///
    /// # Errors
    /// T0756, which names the unusable file.
    pub fn new(
        certificate: &[u8],
        key: &[u8],
        authority: &[u8],
    ) -> std::result::Result<TlsConfig, Diagnostic> {
        let refuse = |file: &str, why: String| {
            Diagnostic::error(&T0756, format!("the {file} cannot be used: {why}"))
                .with_hint("the files must be in PEM format, as openssl writes them")
        };
        let read_certificates =
            |file: &str, pem: &[u8]| -> std::result::Result<Vec<CertificateDer<'static>>, Diagnostic> {
                let read: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
                match read {
                    Ok(list) if !list.is_empty() => Ok(list),
                    Ok(_) => Err(refuse(file, "it holds no certificate".into())),
                    Err(e) => Err(refuse(file, e.to_string())),
                }
            };
        let chain = read_certificates("certificate", certificate)?;
        let mut roots = RootCertStore::empty();
        for root in read_certificates("certificate of the authority", authority)? {
            roots.add(root).map_err(|e| refuse("certificate of the authority", e.to_string()))?;
        }
        let roots = Arc::new(roots);
        let key = || PrivateKeyDer::from_pem_slice(key).map_err(|e| refuse("key", e.to_string()));
        let provider = Arc::new(ring::default_provider());
        let config_error = |e: rustls::Error| refuse("key with its certificate", e.to_string());
        let versions = &[&version::TLS13];
        let authority =
            Arc::new(AuthorityVerifier { roots: Arc::clone(&roots), provider: Arc::clone(&provider) });
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(config_error)?
            .dangerous()
            .with_custom_certificate_verifier(authority)
            .with_client_auth_cert(chain.clone(), key()?)
            .map_err(config_error)?;
        client.enable_sni = false;
        client.resumption = rustls::client::Resumption::disabled();
        let client_verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(|e| refuse("certificate of the authority", e.to_string()))?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .map_err(config_error)?
            .with_client_cert_verifier(client_verifier)
            .with_single_cert(chain, key()?)
            .map_err(config_error)?;
        server.send_tls13_tickets = 0;
        Ok(TlsConfig { client: Arc::new(client), server: Arc::new(server) })
    }

    pub(super) fn open_session(&self, socket: TcpStream, side: HandshakeSide) -> Result<TlsSession> {
        let connection = match side {
            HandshakeSide::Connector => {
                let name = ServerName::try_from("tessera").map_err(Error::other)?;
                let client = ClientConnection::new(Arc::clone(&self.client), name).map_err(Error::other)?;
                Connection::Client(client)
            }
            HandshakeSide::Acceptor => {
                let server = ServerConnection::new(Arc::clone(&self.server)).map_err(Error::other)?;
                Connection::Server(server)
            }
        };
        Ok(TlsSession { connection, socket, may_hold_input: false })
    }
}

/// Verifies that a peer's certificate was issued by the authority. The name is not checked, because
/// ranks have no names to compare with an address.
#[derive(Debug)]
struct AuthorityVerifier {
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for AuthorityVerifier {
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
        Err(rustls::Error::General("only TLS 1.3 is supported".into()))
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

/// A TLS session over a non-blocking socket.
pub(super) struct TlsSession {
    connection: Connection,
    socket: TcpStream,
    /// Whether the last read filled its whole buffer, so that more plaintext may be buffered here.
    may_hold_input: bool,
}

impl TlsSession {
    pub(super) fn complete_handshake(&mut self, deadline: Instant) -> Result<()> {
        while self.connection.is_handshaking() || self.connection.wants_write() {
            match self.flush() {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    wait_ready(self.socket.as_fd(), PollFlags::OUT, deadline)?;
                    continue;
                }
                Err(e) => return Err(e),
            }
            if !self.connection.is_handshaking() {
                break;
            }
            match self.read_packets() {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    wait_ready(self.socket.as_fd(), PollFlags::IN, deadline)?;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Returns a secret that only this session's two ends know.
    pub(super) fn export_channel_binding(&self) -> Result<[u8; 32]> {
        let label = b"EXPERIMENTAL-tessera-run";
        self.connection.export_keying_material([0; 32], label, None).map_err(Error::other)
    }

    /// Reads bytes from the socket into the session; returns 0 at the end of the stream.
    fn read_packets(&mut self) -> Result<usize> {
        let n = self.connection.read_tls(&mut self.socket)?;
        if let Err(e) = self.connection.process_new_packets() {
            // Sends the TLS alert, which gives the peer as much of the reason as TLS allows.
            let _ = self.connection.write_tls(&mut self.socket);
            return Err(Error::new(ErrorKind::InvalidData, e));
        }
        Ok(n)
    }
}

impl ByteStream for TlsSession {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        loop {
            match self.connection.reader().read(into) {
                Ok(n) => {
                    self.may_hold_input = n > 0 && n == into.len();
                    return Ok(n);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
            self.may_hold_input = false;
            self.read_packets()?;
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
        self.may_hold_input
    }

    fn wants_write(&self) -> bool {
        self.connection.wants_write()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
