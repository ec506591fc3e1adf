//! Prints the throughput of the heavy kernels and of collectives on this machine: `cargo run
//! --release --example rates -- [THREADS]`.

#![allow(clippy::disallowed_methods, reason = "a program reads its arguments")]

use rustix::time::{ClockId, clock_gettime};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};
use tessera_cpu::Pool;
use tessera_cpu::arena::Arena;
use tessera_cpu::collectives::all_reduce;
use tessera_cpu::kernels::{
    Activation, MatmulWeight, PackedWeight, RopeCache, RopeSpec, Scratch, attention, layer_norm, matmul,
    renoise, rope,
};
use tessera_cpu::tcp::{PeerStream, TcpTransport};
use tessera_cpu::transport::{CommFault, CommLayout, Transport};
use tessera_mesh::Reduction;

fn main() {
    let threads: usize = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(1);
    let Ok(pool) = Pool::new(threads) else { return eprintln!("cannot start {threads} threads") };
    let mut scratch = Scratch::new();
    println!("{threads} threads");
    for (m, n, k) in [
        (192, 128, 128),
        (192, 128, 3072),
        (192, 3072, 128),
        (192, 512, 128),
        (192, 128, 512),
        (192, 1536, 1536),
        (3, 6144, 1024),
        (1, 1024, 1024),
        (2160, 1536, 1536),
    ] {
        let (x, w) = (random_values(m * k), random_values(n * k));
        let packed = PackedWeight::new(&pool, &w, n, k);
        let mut out = vec![0.0; m * n];
        for (name, w) in [("packed", MatmulWeight::Packed(&packed)), ("plain", MatmulWeight::Plain(&w))] {
            for segments in [1, 8] {
                let t = best_seconds(threads, || {
                    matmul(&pool, &mut scratch, &mut out, &x, w, (m, n, k), None, None, segments);
                });
                let rate = (2 * m * n * k) as f64 / t / 1e9;
                println!(
                    "matmul {m}x{n}x{k} {name} segments {segments}: {:.1} us, {rate:.1} Gflop/s",
                    t * 1e6
                );
            }
        }
    }
    for (n, r, heads, d) in
        [(192, 384, 4, 32), (192, 8, 4, 32), (192, 1152, 12, 128), (192, 192, 6, 16), (576, 1152, 8, 64)]
    {
        let dl = heads * d;
        let (q, k, v) = (random_values(n * dl), random_values(r * dl), random_values(r * dl));
        let mut out = vec![0.0; n * dl];
        let t = best_seconds(threads, || attention(&pool, &mut scratch, &mut out, &q, &k, &v, (dl, d), None));
        let rate = (4 * n * r * dl) as f64 / t / 1e9;
        println!("attention {n} on {r}, {heads} x {d}: {:.1} us, {rate:.1} Gflop/s", t * 1e6);
    }
    let (n, d) = (192, 1536);
    let x = random_values(n * d);
    let mut out = vec![0.0; n * d];
    let mut report = |name: &str, f: &mut dyn FnMut(&mut [f32])| {
        let t = best_seconds(threads, || f(&mut out));
        println!("{name} {n}x{d}: {:.1} us, {:.2} ns an element", t * 1e6, t * 1e9 / (n * d) as f64);
    };
    report("layer_norm", &mut |o| layer_norm(&pool, o, &x, &x[..d], &x[..d], 1e-6));
    let mut cache = RopeCache::new();
    let spec = RopeSpec { head_dim: 128, grid: [3, 8, 8], start: 3, frame_stride: 1 };
    report("rope", &mut |o| rope(&pool, o, &x, d, 0, cache.get(spec)));
    let key = tessera_base::random::DrawKey { seed: 1, chunk: 0, draw: 0 };
    report("renoise", &mut |o| renoise(&pool, o, &x, 0.5, key, 0));
    report("gelu", &mut |o| {
        tessera_cpu::kernels::bias_act(&pool, o, &x, &x[..d], Some(Activation::GeluTanh));
    });
    for (members, elements, rounds) in
        [(2, 64, 100_000), (2, 18_432, 10_000), (2, 294_912, 1000), (4, 64, 5000), (4, 18_432, 2000)]
    {
        for (through, ends) in
            [("memory", memory_transports as CreateTransports), ("streams", stream_transports)]
        {
            if let Err(fault) = report_all_reduce(through, ends, members, elements, rounds) {
                eprintln!("all_reduce among {members} through {through}: {fault}");
            }
        }
    }
}

type Transports = Result<Vec<Box<dyn Transport>>, Box<dyn std::error::Error>>;
type CreateTransports = fn(CommLayout) -> Transports;

fn memory_transports(layout: CommLayout) -> Transports {
    let fd = Arena::create_memfd(layout)?;
    (0..layout.members).map(|m| Ok(Box::new(Arena::attach(&fd, layout, m)?) as _)).collect()
}

fn stream_transports(layout: CommLayout) -> Transports {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut wires: Vec<Vec<Option<Box<dyn PeerStream>>>> =
        (0..layout.members).map(|_| (0..layout.members).map(|_| None).collect()).collect();
    let members = layout.members;
    for (low, high) in (0..members).flat_map(|low| (low + 1..members).map(move |high| (low, high))) {
        let a = TcpStream::connect(listener.local_addr()?)?;
        let b = listener.accept()?.0;
        a.set_nodelay(true)?;
        b.set_nodelay(true)?;
        wires[low][high] = Some(Box::new(a));
        wires[high][low] = Some(Box::new(b));
    }
    wires.into_iter().enumerate().map(|(m, w)| Ok(Box::new(TcpTransport::new(layout, m, w)?) as _)).collect()
}

/// Prints the latency of an all-reduce between threads.
fn report_all_reduce(
    through: &str,
    ends: CreateTransports,
    members: usize,
    elements: usize,
    rounds: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    let arenas = ends(CommLayout { members, slots: 4, slot_bytes: 4 * elements })?;
    let times = std::thread::scope(|s| {
        let threads: Vec<_> = arenas
            .into_iter()
            .map(|mut arena| {
                s.spawn(move || {
                    let (x, mut out) = (vec![1.0; elements], vec![0.0; elements]);
                    let mut times = Vec::with_capacity(rounds);
                    for _ in 0..rounds {
                        let t = Instant::now();
                        let deadline = t + Duration::from_secs(10);
                        arena.publish_and_collect(1, &x, deadline, &mut |v| {
                            all_reduce(&mut out, v, Reduction::Sum);
                        })?;
                        times.push(t.elapsed().as_nanos() as f64 / 1e3);
                    }
                    Ok::<_, CommFault>(times)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap_or(Ok(Vec::new()))).collect::<Vec<_>>()
    });
    let mut times = times.into_iter().next().unwrap_or(Ok(Vec::new()))?;
    times.sort_by(f64::total_cmp);
    let at = |q: f64| times.get((times.len() as f64 * q) as usize).copied().unwrap_or(f64::NAN);
    let mean = times.iter().sum::<f64>() / times.len() as f64;
    println!(
        "all_reduce of {elements} among {members} through {through}: p10 {:.1} us, median {:.1} us, mean {mean:.1} us",
        at(0.1),
        at(0.5)
    );
    Ok(())
}

fn random_values(n: usize) -> Vec<f32> {
    let mut out = vec![0.0; n];
    tessera_base::random::fill_normals(
        tessera_base::random::DrawKey { seed: 5, chunk: 0, draw: 0 },
        0,
        &mut out,
    );
    out
}

/// Returns the seconds of the fastest of many calls: CPU time of the thread if one thread does all
/// the work, else elapsed time.
fn best_seconds(threads: usize, mut f: impl FnMut()) -> f64 {
    let clock = if threads == 1 { ClockId::ThreadCPUTime } else { ClockId::Monotonic };
    let now = || {
        let t = clock_gettime(clock);
        t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
    };
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    while begin.elapsed().as_secs_f64() < 0.3 {
        let t = now();
        f();
        best = best.min(now() - t);
    }
    best
}
