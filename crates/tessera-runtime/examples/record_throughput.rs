//! Prints what protecting a stream costs: wall time and processor time per byte over loopback TCP,
//! for bare TCP, a shared secret, and TLS. Sender and receiver are threads of this process.
//!
//! `cargo run --release -p tessera-runtime --example record_throughput`

use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustix::time::{ClockId, clock_gettime};
use tessera_runtime::driver::ByteStream;
use tessera_runtime::driver::secure::{
    Claim, ConnectionPurpose, Credentials, Secret, TlsConfig, accept_peer, connect_peer, read_exact,
    write_all,
};

/// Bytes of one measurement.
const TOTAL_BYTES: usize = 2 << 30;
/// Bytes of one write: about the activations that two ranks exchange at once.
const WRITE_BYTES: usize = 4 << 20;
/// Measurements per kind of stream; the median is printed.
const ROUNDS: usize = 5;

type Pair = (Box<dyn ByteStream>, Box<dyn ByteStream>);

fn main() {
    let secret = Credentials::Secret(Secret::new(&[7; 32]).expect("long enough"));
    let tls = Credentials::Tls(make_tls_config(), None);
    println!("{:<10} {:>12} {:>22} {:>14}", "stream", "GB/s (wall)", "ns of CPU per KiB", "handshake us");
    for (name, credentials) in [("bare TCP", None), ("secret", Some(&secret)), ("TLS", Some(&tls))] {
        let mut rounds: Vec<(f64, f64, f64)> = (0..ROUNDS).map(|_| measure(credentials)).collect();
        rounds.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (rate, cpu_ns_per_kib, handshake_us) = rounds[ROUNDS / 2];
        println!("{name:<10} {rate:>12.2} {cpu_ns_per_kib:>22.0} {handshake_us:>14.0}");
    }
}

/// Returns GB/s, nanoseconds of processor time per KiB of both ends, and the handshake's
/// microseconds.
fn measure(credentials: Option<&Credentials>) -> (f64, f64, f64) {
    let begun = Instant::now();
    let (mut sender, mut receiver) = open_pair(credentials);
    let handshake_us = begun.elapsed().as_secs_f64() * 1e6;
    let deadline = Instant::now() + Duration::from_secs(600);
    let (begun, cpu_ns) = (Instant::now(), process_cpu_ns());
    std::thread::scope(|s| {
        s.spawn(move || {
            let bytes: Vec<u8> = (0..WRITE_BYTES).map(|i| (i >> 3) as u8).collect();
            for _ in 0..TOTAL_BYTES / WRITE_BYTES {
                write_all(&mut *sender, &bytes, deadline).expect("the receiver reads");
            }
        });
        let mut into = vec![0; 1 << 20];
        for _ in 0..TOTAL_BYTES / into.len() {
            read_exact(&mut *receiver, &mut into, deadline).expect("the sender sends");
        }
    });
    let wall_s = begun.elapsed().as_secs_f64();
    let cpu_ns = (process_cpu_ns() - cpu_ns) as f64;
    (TOTAL_BYTES as f64 / wall_s / 1e9, cpu_ns / (TOTAL_BYTES as f64 / 1024.0), handshake_us)
}

fn open_pair(credentials: Option<&Credentials>) -> Pair {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let here = TcpStream::connect(listener.local_addr().expect("bound")).expect("the listener accepts");
    let there = listener.accept().expect("a connection").0;
    let Some(credentials) = credentials else {
        here.set_nonblocking(true).expect("a socket");
        there.set_nonblocking(true).expect("a socket");
        return (Box::new(here), Box::new(there));
    };
    let deadline = Instant::now() + Duration::from_secs(10);
    let claim = |rank, expected_peer| Claim {
        purpose: ConnectionPurpose::Communicator,
        rank,
        expected_peer,
        world_size: 2,
        communicator: 0,
        session: 1,
    };
    std::thread::scope(|s| {
        let accepted = s.spawn(|| accept_peer(there, credentials, &claim(0, 1), deadline));
        let connected =
            connect_peer(here, credentials, &claim(1, 0), deadline).expect("the same credentials");
        (connected.stream, accepted.join().expect("no panic").expect("the same credentials").stream)
    })
}

fn process_cpu_ns() -> u64 {
    let t = clock_gettime(ClockId::ProcessCPUTime);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

fn make_tls_config() -> TlsConfig {
    let mut params = CertificateParams::new(vec![]).expect("no names");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("randomness");
    let authority = CertifiedIssuer::self_signed(params, key).expect("a certificate");
    let key = KeyPair::generate().expect("randomness");
    let params = CertificateParams::new(vec!["rank".to_string()]).expect("a name");
    let certificate = params.signed_by(&key, &authority).expect("a certificate");
    let [certificate, key, authority] = [certificate.pem(), key.serialize_pem(), authority.pem()];
    TlsConfig::new(certificate.as_bytes(), key.as_bytes(), authority.as_bytes()).expect("valid files")
}
