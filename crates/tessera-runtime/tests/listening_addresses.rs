//! Tests at which addresses ranks listen while they wait for each other. No other test runs in this
//! process, so all of its listening sockets are those of the ranks.

#![allow(clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "the test reads the tables of the kernel")]

use std::net::TcpListener;
use std::time::{Duration, Instant};

use tessera_runtime::driver::rendezvous::{RendezvousSpec, join_peers};
use tessera_runtime::driver::secure::{Credentials, Secret};
use tessera_runtime::driver::{ControlTopology, StopHandle};

fn rank_spec(rank: u32, port: u16) -> RendezvousSpec {
    RendezvousSpec {
        rank,
        world_size: 3,
        master: ("127.0.0.1".into(), port),
        bind: None,
        credentials: Credentials::Secret(Secret::new(&[5; 32]).unwrap()),
        topology: ControlTopology::Mesh,
        communicators: vec![vec![0, 1, 2]],
        parity_values: Vec::new(),
        session: 77,
        leader_payload: Vec::new(),
        join_limit: Duration::from_secs(20),
    }
}

/// Returns the local addresses at which this process listens, as the kernel's tables spell them:
/// `0100007F:1F90` is 127.0.0.1, port 8080.
fn listening_addresses() -> Vec<String> {
    let own: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|f| std::fs::read_link(f.ok()?.path()).ok())
        .filter_map(|l| Some(l.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_string()))
        .collect();
    ["/proc/self/net/tcp", "/proc/self/net/tcp6"]
        .iter()
        .flat_map(|table| {
            std::fs::read_to_string(table).unwrap_or_default().lines().map(str::to_string).collect::<Vec<_>>()
        })
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // State 0A is LISTEN; the tenth field is the inode.
            let is_ours =
                fields.get(3) == Some(&"0A") && own.iter().any(|o| Some(&o.as_str()) == fields.get(9));
            is_ours.then(|| fields[1].to_string())
        })
        .collect()
}

// proves: C-17
#[test]
fn no_rank_listens_at_every_address_by_default() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let join = |rank| {
        let spec = rank_spec(rank, port);
        let run = move || join_peers(&spec, &StopHandle::default(), &mut |_| (), &mut || Ok(())).is_ok();
        std::thread::spawn(run)
    };
    let first = [join(0), join(1)];
    // Rank 0 listens at the given port, and rank 1 at a port of its own until rank 2 joins.
    let until = Instant::now() + Duration::from_secs(10);
    let mut seen = Vec::new();
    while seen.len() < 2 {
        assert!(Instant::now() < until, "{seen:?}");
        std::thread::yield_now();
        seen = listening_addresses();
    }
    assert!(first.into_iter().chain([join(2)]).all(|thread| thread.join().unwrap()));
    assert!(seen.iter().all(|address| address.starts_with("0100007F:")), "{seen:?}");
}
