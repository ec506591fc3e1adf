//! Measures the latency from the leader's decision to the commit at every rank, with engines that
//! do nothing, next to an echo of the same message sizes over bare sockets: `cargo run --release -p
//! tessera-runtime --example commit_latency [RANKS [CALLS]]`.

#![allow(clippy::disallowed_methods, reason = "a program reads its arguments and keeps files")]

#[path = "../tests/support/mod.rs"]
mod support;

use support::latency::{measure_echo, measure_lockstep, percentiles, run_child};
use tessera_runtime::driver::ControlTopology;

fn main() {
    run_child();
    let mut numbers = std::env::args().skip(1).filter_map(|a| a.parse().ok());
    let (ranks, calls) = (numbers.next().unwrap_or(8), numbers.next().unwrap_or(2000));
    let dir = std::env::temp_dir().join(format!("commit-latency-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("the directory can be created");
    println!("{ranks} ranks, {calls} calls, µs from decision to the last rank's commit");
    let print_line = |what: &str, ns: Vec<u64>| {
        let calls = ns.len();
        let (p50, p99) = percentiles(ns);
        println!("{what:>12}: p50 {:>6.1}  p99 {:>7.1}  ({calls} calls)", p50 as f64 / 1e3, p99 as f64 / 1e3);
    };
    print_line("echo", measure_echo(ranks, calls, &dir));
    print_line("lockstep", measure_lockstep(ControlTopology::Mesh, ranks, calls, &dir));
    print_line("pp1", measure_lockstep(ControlTopology::ExternalLeader, ranks + 1, calls, &dir));
    print_line("echo", measure_echo(ranks, calls, &dir));
    let _ = std::fs::remove_dir_all(&dir);
}
