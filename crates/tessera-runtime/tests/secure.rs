//! Strangers are kept out, on loopback.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use tessera_base::Diagnostic;
use tessera_runtime::driver::secure::{
    Claim, Credentials, HELLO_BYTES, Proved, Purpose, Secret, Tls, accept, connect, read_exact, write_all,
};

fn secret(byte: u8) -> Secret {
    Secret::new(&[byte; 40]).unwrap()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

fn claim(rank: u32, to: u32, world: u32) -> Claim {
    Claim { purpose: Purpose::Join, rank, to, world, lane: 0, session: 0 }
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (a, listener.accept().unwrap().0)
}

type Both = (Result<Proved, Diagnostic>, Result<Proved, Diagnostic>);

/// What who connects and who accepts come to.
fn meet(connects: &Credentials, accepts: &Credentials) -> Both {
    let (a, b) = sockets();
    std::thread::scope(|s| {
        let there = s.spawn(|| accept(b, accepts, &claim(0, 1, 2), soon()));
        let here = connect(a, connects, &claim(1, 0, 3), soon());
        (here, there.join().unwrap())
    })
}

fn talk(both: Both) {
    let (mut a, mut b) = (both.0.unwrap(), both.1.unwrap());
    assert_eq!((a.claim, b.claim), (claim(0, 1, 2), claim(1, 0, 3)));
    let data: Vec<u8> = (0..3_000_000u32).map(|i| (i >> 5) as u8).collect();
    std::thread::scope(|s| {
        s.spawn(|| write_all(&mut *a.stream, &data, soon()).unwrap());
        let mut got = vec![0; data.len()];
        read_exact(&mut *b.stream, &mut got, soon()).unwrap();
        assert!(got == data);
        write_all(&mut *b.stream, b"heard", soon()).unwrap();
    });
    let mut got = [0; 5];
    read_exact(&mut *a.stream, &mut got, soon()).unwrap();
    assert_eq!(&got, b"heard");
    drop(b);
    assert!(a.stream.read(&mut got).map_or(true, |n| n == 0));
}

fn refused(both: Both) {
    for d in [both.0.unwrap_err(), both.1.unwrap_err()] {
        assert_eq!(d.code.id, "T0756");
        // Neither side is told what the other one's proof lacked.
        let said = format!("{} {:?} {:?}", d.message, d.places, d.hint);
        for word in ["mac", "hash", "expired", "UnknownIssuer", "signature", "nonce"] {
            assert!(!said.contains(word), "{said}");
        }
    }
}

#[test]
fn the_same_secret_opens_and_another_does_not() {
    let [a, b] = [1, 2].map(|s| Credentials::Secret(secret(s)));
    talk(meet(&a, &a));
    refused(meet(&a, &b));
    assert_eq!(Secret::new(&[1; 31]).unwrap_err().code.id, "T0756");
    assert!(!format!("{a:?}").contains('1'));
}

struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Authority {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn member(&self, last_year: i32, believes: &Authority) -> Tls {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["rank".to_string()]).unwrap();
        params.not_after = date_time_ymd(last_year, 1, 1);
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Tls::new(certificate.pem().as_bytes(), key.serialize_pem().as_bytes(), believes.0.pem().as_bytes())
            .unwrap()
    }
}

#[test]
fn certificates_of_the_same_authority_open_and_others_do_not() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let plain = |tls: &Tls| Credentials::Tls(tls.clone(), None);
    let [a, b] = [0, 1].map(|_| ours.member(2100, &ours));
    talk(meet(&plain(&a), &plain(&b)));
    let with = |tls: &Tls, s| Credentials::Tls(tls.clone(), Some(secret(s)));
    talk(meet(&with(&a, 1), &with(&b, 1)));
    refused(meet(&with(&a, 1), &with(&b, 2)));
    refused(meet(&with(&a, 1), &plain(&b)));
    for stranger in [theirs.member(2100, &ours), theirs.member(2100, &theirs), ours.member(2001, &ours)] {
        refused(meet(&plain(&stranger), &plain(&b)));
        refused(meet(&plain(&a), &plain(&stranger)));
    }
    let bare = Credentials::Secret(secret(1));
    refused(meet(&bare, &with(&b, 1)));
    refused(meet(&with(&a, 1), &bare));
    let d = Tls::new(b"", b"", b"").unwrap_err();
    assert!(d.message.contains("the certificate cannot be used: it holds no certificate"), "{}", d.message);
}

#[test]
fn who_says_nothing_is_not_waited_for() {
    for credentials in [
        Credentials::Secret(secret(1)),
        Credentials::Tls(Authority::new().member(2100, &Authority::new()), None),
    ] {
        let (_silent, b) = sockets();
        let begun = Instant::now();
        let until = begun + Duration::from_millis(200);
        let d = accept(b, &credentials, &claim(0, 1, 2), until).unwrap_err();
        assert_eq!(d.code.id, "T0756");
        assert!((200..2000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    }
}

/// Passes bytes on until an end closes, and keeps what the first end said.
fn between(from: TcpStream, to: TcpStream) -> Vec<u8> {
    let pump = |mut a: TcpStream, mut b: TcpStream| {
        let (mut said, mut some) = (Vec::new(), [0; 4096]);
        while let Ok(n @ 1..) = a.read(&mut some) {
            said.extend(&some[..n]);
            if b.write_all(&some[..n]).is_err() {
                break;
            }
        }
        let _ = b.shutdown(std::net::Shutdown::Write);
        said
    };
    std::thread::scope(|s| {
        let (back, forth) = (to.try_clone().unwrap(), from.try_clone().unwrap());
        s.spawn(move || pump(back, forth));
        pump(from, to)
    })
}

#[test]
fn what_was_said_once_opens_nothing_again() {
    let credentials = Credentials::Secret(secret(1));
    let ((a, b), (c, d)) = (sockets(), sockets());
    let said = std::thread::scope(|s| {
        let said = s.spawn(|| between(b, c));
        let there = s.spawn(|| accept(d, &credentials, &claim(0, 1, 2), soon()));
        let here = connect(a, &credentials, &claim(1, 0, 2), soon()).unwrap();
        drop((here, there.join().unwrap().unwrap()));
        said.join().unwrap()
    });
    assert_eq!(said.len(), HELLO_BYTES + 32);
    let (mut a, b) = sockets();
    a.write_all(&said).unwrap();
    assert_eq!(accept(b, &credentials, &claim(0, 1, 2), soon()).unwrap_err().code.id, "T0756");
}

#[test]
fn an_echo_of_its_own_words_opens_nothing() {
    let credentials = Credentials::Secret(secret(1));
    let (a, mut b) = sockets();
    let echo = std::thread::spawn(move || {
        let mut some = [0; 4096];
        while let Ok(n @ 1..) = b.read(&mut some) {
            b.write_all(&some[..n]).unwrap();
        }
    });
    assert_eq!(connect(a, &credentials, &claim(1, 0, 2), soon()).unwrap_err().code.id, "T0756");
    echo.join().unwrap();
}
