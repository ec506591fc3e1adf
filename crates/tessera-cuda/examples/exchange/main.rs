//! Tries collectives between the GPUs of this host, both ways, and says how long they take:
//! `cargo run --release -p tessera-cuda --example exchange -- --gpus N`. Folders of libraries are told by TESSERA_CUDA_LIBS.
//!
//! It starts itself once per GPU and scene, compares every result with a computation on the host, and ends with 0 only if all is
//! as it should be. A scene that takes too long is ended.
#![allow(dead_code, reason = "the room's own sources, of which this uses a part")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use tessera_ir::DType;
use tessera_mesh::Reduction;

#[path = "../../src/compile.rs"]
mod compile;
#[path = "../../src/driver.rs"]
mod driver;
#[path = "../../src/exchange/mod.rs"]
mod exchange;
#[path = "../../src/libraries.rs"]
mod libraries;
#[path = "../../src/nccl.rs"]
mod nccl;
#[path = "../../src/tables.rs"]
mod tables;

mod values;

use compile::{Compiler, Shelf};
use driver::{Context, Done, Event, Memory, Stream, download, failed, upload};
use exchange::{Group, GroupFault, Kind, Move, Terms, Via, Way};
use libraries::Libraries;
use nccl::{UniqueId, unique_id};
use values::{cut, data, decode, encode, reduce, take};

/// Name, longest time in seconds.
const SCENES: [(&str, u64); 8] = [
    ("peers", 150),
    ("nccl", 150),
    ("late", 40),
    ("skip", 40),
    ("other", 40),
    ("abort", 40),
    ("abort-nccl", 40),
    ("speed", 240),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, me, members, scene, mib, folder] = &args[..]
        && flag == "--member"
    {
        let number = |t: &String| t.parse::<usize>().unwrap_or(0);
        let seat = Seat::open(number(me), number(members), Path::new(folder), scene);
        let passed = seat.and_then(|mut seat| play(&mut seat, scene, number(mib)));
        let code = match passed {
            Ok(true) => 0,
            Ok(false) => 1,
            Err(e) => {
                println!("FAIL {scene}: member {me}: {e}");
                1
            }
        };
        // What is stuck on the device would be waited for by whoever frees it.
        std::process::exit(code);
    }
    let value = |flag: &str| args.iter().position(|a| a == flag).and_then(|i| args.get(i + 1));
    let gpus: usize = value("--gpus").and_then(|v| v.parse().ok()).unwrap_or(2);
    let mib: usize = value("--mib").and_then(|v| v.parse().ok()).unwrap_or(48);
    let only = value("--scene");
    let folder = std::env::temp_dir().join(format!("exchange-{}", std::process::id()));
    if let Err(e) = std::fs::create_dir_all(&folder) {
        println!("FAIL {}: {e}", folder.display());
        return ExitCode::FAILURE;
    }
    let mut passed = true;
    for (scene, seconds) in SCENES.into_iter().filter(|(s, _)| only.is_none_or(|o| o == s)) {
        let began = Instant::now();
        let whole = stage(scene, seconds, gpus, mib, &folder);
        println!(
            "{} scene {scene} ({:.1} s)",
            if whole { "PASS" } else { "FAIL" },
            began.elapsed().as_secs_f64()
        );
        passed &= whole;
    }
    let _ = std::fs::remove_dir_all(&folder);
    println!("{}", if passed { "PASS all" } else { "FAIL" });
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Plays one scene with a process per GPU; whether all of them say that it went well in time.
fn stage(scene: &str, seconds: u64, gpus: usize, mib: usize, folder: &Path) -> bool {
    let Ok(exe) = std::env::current_exe() else { return false };
    let mut children: Vec<Child> = Vec::new();
    for me in 0..gpus {
        let mut command = Command::new(&exe);
        command
            .arg("--member")
            .args([me, gpus].map(|n| n.to_string()))
            .arg(scene)
            .arg(mib.to_string())
            .arg(folder);
        command.env("NCCL_NVLS_ENABLE", "0");
        match command.spawn() {
            Ok(child) => children.push(child),
            Err(e) => println!("FAIL {scene}: member {me} does not start: {e}"),
        }
    }
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let mut codes: Vec<Option<i32>> = vec![None; children.len()];
    while codes.iter().any(Option::is_none) {
        for (child, code) in children.iter_mut().zip(&mut codes) {
            if code.is_none()
                && let Ok(Some(status)) = child.try_wait()
            {
                *code = Some(status.code().unwrap_or(-1));
            }
        }
        if Instant::now() > deadline {
            for (me, (child, code)) in children.iter_mut().zip(&mut codes).enumerate() {
                if code.is_none() {
                    println!("FAIL {scene}: member {me} has not ended after {seconds} s");
                    let _ = child.kill();
                    let _ = child.wait();
                    *code = Some(-1);
                }
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    codes.len() == gpus && codes.iter().all(|c| *c == Some(0))
}

/// Kernels of this run, for processes that come later.
#[derive(Debug)]
struct Kept(PathBuf);

impl Shelf for Kept {
    fn find(&self, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.0.join(name)).ok()
    }

    fn keep(&self, name: &str, image: &[u8]) {
        let part = self.0.join(format!("{name}.part{}", std::process::id()));
        let _ = std::fs::create_dir_all(&self.0)
            .and_then(|()| std::fs::write(&part, image))
            .and_then(|()| std::fs::rename(&part, self.0.join(name)));
    }
}

/// One process: a GPU and what it needs.
struct Seat {
    me: usize,
    members: usize,
    folder: PathBuf,
    scene: String,
    libraries: Libraries,
    context: Context,
    compiler: Compiler,
}

impl Seat {
    fn open(me: usize, members: usize, folder: &Path, scene: &str) -> Done<Seat> {
        let told = std::env::var_os("TESSERA_CUDA_LIBS").unwrap_or_default();
        let libraries = Libraries::load(&std::env::split_paths(&told).collect::<Vec<PathBuf>>());
        for lost in &libraries.lost {
            let needed = ["libcuda.so.1", "libnvrtc.so.13", "libnccl.so.2"];
            if needed.contains(&lost.library.file()) {
                return failed(lost.diagnostic().message);
            }
        }
        let context = Context::open(me as u32)?;
        let nvrtc = tables::Nvrtc::load(&libraries).or_else(|d| failed(d.message))?;
        let kept = Arc::new(Kept(folder.join("kernels")));
        let compiler = Compiler::new(nvrtc, (9, 0), Some(kept))?;
        Ok(Seat { me, members, folder: folder.into(), scene: scene.into(), libraries, context, compiler })
    }

    /// Meets the others in a group of a name, with exchange memory.
    fn group(&mut self, name: &str, terms: Terms, memory: &Memory) -> Done<Group> {
        let file = self.folder.join(format!("id-{}-{name}", self.scene));
        let id = if self.me == 0 {
            let id = unique_id(&self.libraries).or_else(|d| failed(d.message))?;
            let part = file.with_extension("part");
            let written = std::fs::write(&part, id.0).and_then(|()| std::fs::rename(&part, &file));
            written.or_else(|e| failed(e.to_string()))?;
            id
        } else {
            let deadline = Instant::now() + Duration::from_secs(30);
            loop {
                if let Ok(bytes) = std::fs::read(&file)
                    && let Ok(id) = <[u8; 128]>::try_from(bytes)
                {
                    break UniqueId(id);
                }
                if Instant::now() > deadline {
                    return failed("no id of member 0");
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        };
        let abort = Arc::new(AtomicBool::new(false));
        let place = (self.me, self.members);
        let began = Instant::now();
        let mut group = Group::join(&self.libraries, &mut self.compiler, &id, place, terms, abort)?;
        let met = began.elapsed();
        group.share(memory)?;
        if self.me == 0 {
            println!(
                "     {}: group {name} of {} meets by {:?} after {} + {} ms{}",
                self.scene,
                self.members,
                group.way(),
                met.as_millis(),
                (began.elapsed() - met).as_millis(),
                group.why_not_peers().map(|w| format!(" ({w})")).unwrap_or_default(),
            );
        }
        Ok(group)
    }
}

fn terms(way: Way, patience_ms: u64) -> Terms {
    Terms {
        way,
        blocks: 24,
        patience: Duration::from_millis(patience_ms),
        setup: Duration::from_secs(30),
        host: host(),
        staging_bytes: [256 << 20; 2],
    }
}

/// A number of this host's boot.
fn host() -> u64 {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    boot.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

fn play(seat: &mut Seat, scene: &str, mib: usize) -> Done<bool> {
    match scene {
        "peers" => kinds(seat, Way::Peers),
        "nccl" => kinds(seat, Way::Nccl),
        "speed" => speed(seat, mib << 20),
        _ => faults(seat, scene),
    }
}

// Every kind of collective.

/// One collective as one member sees it.
struct Case {
    name: String,
    dtype: DType,
    kind: Kind,
    operand: Vec<f32>,
    want: Vec<f32>,
    /// Bytes that operands and results lie off their alignment.
    askew: usize,
    /// Where NCCL's result may differ: how far, relative to the sum of magnitudes.
    near: Option<f32>,
}

/// Where results begin in exchange memory.
const RESULTS: usize = 96 << 20;
const GUARD: usize = 64;

fn kinds(seat: &mut Seat, way: Way) -> Done<bool> {
    let memory = Memory::new(2 * RESULTS)?;
    let mut group = seat.group("all", terms(way, 5000), &memory)?;
    let stream = Stream::new(true)?;
    let mut passed = true;
    let mut op = 0;
    let cases = cases(seat.me, seat.members, way);
    let count = cases.len();
    for case in cases {
        op += 1;
        if let Err(e) = try_case(seat, &mut group, &memory, &stream, &case, op) {
            println!("FAIL {way:?} {}: member {}: {e}", case.name, seat.me);
            passed = false;
            if let Some(fault) = group.fault() {
                println!("     member {}: {fault}; {:?}", seat.me, group.progress());
                return Ok(false);
            }
        }
    }
    let there = [Group::issue, by_engines]
        .into_iter()
        .try_for_each(|issue: Issue| there_and_back(seat, &mut group, &memory, issue, &stream));
    if let Err(e) = &there {
        println!("FAIL {way:?} there and back: member {}: {e}", seat.me);
    }
    if seat.me == 0 && passed && there.is_ok() {
        println!(
            "PASS {way:?}: {count} collectives eager and replayed, and 40 that overwrite one another's operands"
        );
    }
    Ok(passed && there.is_ok())
}

fn try_case(
    seat: &Seat,
    group: &mut Group,
    memory: &Memory,
    stream: &Stream,
    case: &Case,
    op: u32,
) -> Done<()> {
    let operand_at = 4096 + 256 * seat.me + case.askew;
    let result_at = RESULTS + 4096 + 512 * seat.me + case.askew;
    let places = group.table(&[operand_at as u64, result_at as u64])?;
    let m = Move {
        kind: case.kind.clone(),
        dtype: case.dtype,
        operand: memory.at() + operand_at as u64,
        result: memory.at() + result_at as u64,
        peers_operand: places.iter().map(|p| p[0]).collect(),
        peers_result: places.iter().map(|p| p[1]).collect(),
        fingerprint: 0x5eed_0000 + op,
        op,
        via: Via::Best,
    };
    if m.staging_bytes(seat.me) > 256 << 20 {
        return failed("more staging memory than there is");
    }
    let want = encode(&case.want, case.dtype);
    let poison = vec![0xcd_u8; want.len() + 2 * GUARD];
    upload(m.operand, &encode(&case.operand, case.dtype))?;
    upload(m.result - GUARD as u64, &poison)?;
    group.issue(&m, stream)?;
    drained(group, stream, 15)?;
    check(case, &m, &want, "eager")?;
    upload(m.result - GUARD as u64, &poison)?;
    stream.begin_capture()?;
    let issued = group.issue(&m, stream);
    let graph = stream.end_capture()?;
    issued?;
    for _ in 0..20 {
        stream.replay(&graph)?;
    }
    drained(group, stream, 15)?;
    check(case, &m, &want, "replayed")
}

fn check(case: &Case, m: &Move, want: &[u8], how: &str) -> Done<()> {
    let mut got = vec![0_u8; want.len() + 2 * GUARD];
    download(&mut got, m.result - GUARD as u64)?;
    let (before, rest) = got.split_at(GUARD);
    let (got, after) = rest.split_at(want.len());
    if before.iter().chain(after).any(|b| *b != 0xcd) {
        return failed(format!("{how}: bytes beside the result were written"));
    }
    let (got, want) = (decode(got, case.dtype), decode(want, case.dtype));
    let differs = |g: f32, w: f32| match case.near {
        _ if g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan()) => false,
        None => true,
        Some(near) => (g - w).abs() > near || g.is_nan(),
    };
    let wrong: Vec<usize> = (0..want.len()).filter(|i| differs(got[*i], want[*i])).collect();
    match wrong.first() {
        None => Ok(()),
        Some(i) => failed(format!(
            "{how}: {} of {} elements differ, the first is {i}: {:e} and not {:e}",
            wrong.len(),
            want.len(),
            got[*i],
            want[*i]
        )),
    }
}

fn cases(me: usize, members: usize, way: Way) -> Vec<Case> {
    let mut out = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        let (name, element) = (dtype.name(), dtype.bytes() as usize);
        let case = |name: String, kind: Kind, operand: Vec<f32>, want: Vec<f32>| {
            let near = None;
            Case { name, dtype, kind, operand, want, askew: 0, near }
        };
        for reduction in [Reduction::Sum, Reduction::Tree, Reduction::Max] {
            let near = match (way, reduction) {
                (Way::Peers, _) | (_, Reduction::Max) => None,
                _ if dtype == DType::F32 => Some(1e-6 * (members * members) as f32),
                _ => Some(8e-3 * (members * members) as f32),
            };
            let word = reduction.name();
            for (seed, elements) in
                [1, 7, 1000, 8192, 40_000, 65_536, 1_000_003, 1 << 21].into_iter().enumerate()
            {
                let strange = reduction == Reduction::Max && way == Way::Peers;
                let all: Vec<Vec<f32>> =
                    (0..members).map(|m| data(seed, m, elements, dtype, strange)).collect();
                let want = reduce(&all, reduction, dtype);
                let name = format!("all_reduce {word} {name} of {elements}");
                let kind = Kind::AllReduce { elements, reduction };
                for askew in [0, element] {
                    let name = if askew > 0 { format!("{name} askew") } else { name.clone() };
                    out.push(Case { askew, near, ..case(name, kind.clone(), all[me].clone(), want.clone()) });
                }
            }
            for (shape, dim) in [((37, 24), 0), ((16, 64), 0), ((37, 24), 1), ((5, 17), 1), ((300, 1024), 1)]
            {
                for even in [false, true] {
                    let extent = [shape.0, shape.1][dim];
                    if even && extent % members != 0 {
                        continue;
                    }
                    let parts = cut(extent, members, even);
                    let all: Vec<Vec<f32>> =
                        (0..members).map(|m| data(90, m, shape.0 * shape.1, dtype, false)).collect();
                    let want = take(&reduce(&all, reduction, dtype), shape, dim, &parts[me]);
                    let (rows, columns) = shape;
                    let kind = Kind::ReduceScatter { rows, columns, dim, parts, reduction };
                    let name = format!("reduce_scatter {word} {name} {shape:?} dim {dim} even {even}");
                    out.push(Case { near, ..case(name, kind, all[me].clone(), want) });
                }
            }
        }
        for (shape, dim) in
            [((37, 24), 0), ((16, 64), 0), ((37, 24), 1), ((5, 17), 1), ((560, 1024), 0), ((560, 1024), 1)]
        {
            for even in [false, true] {
                let extent = [shape.0, shape.1][dim];
                if even && extent % members != 0 {
                    continue;
                }
                let parts = cut(extent, members, even);
                let whole = data(91, 0, shape.0 * shape.1, dtype, false);
                let kind = Kind::all_gather(me, shape, dim, &parts, element);
                let name = format!("all_gather {name} {shape:?} dim {dim} even {even}");
                out.push(case(name, kind, take(&whole, shape, dim, &parts[me]), whole.clone()));
            }
        }
        for shape in [(37, 29), (64, 64), (17, 130), (2160, 2560)] {
            for (concat_dim, even) in [(0, false), (0, true), (1, false), (1, true)] {
                let extents = [shape.0, shape.1];
                if even && extents.iter().any(|e| e % members != 0) {
                    continue;
                }
                let concat = cut(extents[concat_dim], members, even);
                let split = cut(extents[1 - concat_dim], members, even);
                let whole = data(92, 0, shape.0 * shape.1, dtype, false);
                let kind = Kind::all_to_all(me, shape, concat_dim, &concat, &split, element);
                let name = format!("all_to_all {name} {shape:?} dim {concat_dim} even {even}");
                let operand = take(&whole, shape, concat_dim, &concat[me]);
                out.push(case(name, kind, operand, take(&whole, shape, 1 - concat_dim, &split[me])));
            }
        }
        for elements in [1, 999, 100_000] {
            let root = members - 1;
            let whole = data(93, root, elements, dtype, false);
            let kind = Kind::broadcast(me, members, root, elements * element);
            let operand = if me == root { whole.clone() } else { Vec::new() };
            out.push(case(format!("broadcast {name} of {elements}"), kind, operand, whole.clone()));
            if members == 2 {
                let kind = Kind::transfer(me, elements * element);
                let (operand, want) = if me == 0 { (whole, Vec::new()) } else { (Vec::new(), whole) };
                out.push(case(format!("transfer {name} of {elements}"), kind, operand, want));
            }
        }
    }
    out
}

/// How a collective is enqueued.
type Issue = fn(&mut Group, &Move, &Stream) -> Done<()>;

/// By the copy engines, where members see one another's memory and bytes change places; as ever where not.
fn by_engines(group: &mut Group, m: &Move, stream: &Stream) -> Done<()> {
    if group.way() != Way::Peers || !matches!(m.kind, Kind::Copy { .. }) {
        return group.issue(m, stream);
    }
    group.open(m, stream)?;
    group.carry(m, stream)?;
    group.close(m, stream)
}

/// An exchange and its way back, from one place to another and back again, twenty times in one graph that is replayed
/// twenty times: an operand that is overwritten too early, or a result that is read too early, would show.
fn there_and_back(
    seat: &Seat,
    group: &mut Group,
    memory: &Memory,
    issue: Issue,
    stream: &Stream,
) -> Done<()> {
    let (me, members) = (seat.me, seat.members);
    let shape = (members * 96, members * 128);
    let (rows, columns) = (cut(shape.0, members, true), cut(shape.1, members, true));
    let whole = data(94, 0, shape.0 * shape.1, DType::Bf16, false);
    let mine = encode(&take(&whole, shape, 0, &rows[me]), DType::Bf16);
    let places = [4096 + 256 * me as u64, (RESULTS + 512 * me) as u64];
    let table = group.table(&places)?;
    let column = |i: usize| table.iter().map(|p| p[i]).collect::<Vec<u64>>();
    let step = |way: usize| Move {
        kind: match way {
            0 => Kind::all_to_all(me, shape, 0, &rows, &columns, 2),
            _ => Kind::all_to_all(me, shape, 1, &columns, &rows, 2),
        },
        dtype: DType::Bf16,
        operand: memory.at() + places[way],
        result: memory.at() + places[1 - way],
        peers_operand: column(way),
        peers_result: column(1 - way),
        fingerprint: 0xba5e + way as u32,
        op: 9000 + way as u32,
        via: Via::Best,
    };
    upload(memory.at() + places[0], &mine)?;
    for way in [0, 1] {
        issue(group, &step(way), stream)?;
    }
    drained(group, stream, 15)?;
    stream.begin_capture()?;
    let issued = (0..40).try_for_each(|i| issue(group, &step(i % 2), stream));
    let graph = stream.end_capture()?;
    issued?;
    for _ in 0..20 {
        stream.replay(&graph)?;
    }
    drained(group, stream, 15)?;
    let mut got = vec![0_u8; mine.len()];
    download(&mut got, memory.at() + places[0])?;
    if got == mine { Ok(()) } else { failed("what came back is not what was sent") }
}

// Speed.

fn speed(seat: &mut Seat, most: usize) -> Done<bool> {
    let memory = Memory::new(2 * most + (4 << 20))?;
    let stream = Stream::new(true)?;
    let mut groups: Vec<(String, Group, Issue)> = Vec::new();
    for blocks in [8, 16, 24, 32] {
        let terms = Terms { blocks, ..terms(Way::Peers, 5000) };
        let group = seat.group(&format!("p{blocks}"), terms, &memory)?;
        groups.push((format!("peers {blocks}"), group, Group::issue));
    }
    let group = seat.group("engines", terms(Way::Peers, 5000), &memory)?;
    groups.push(("engines".into(), group, by_engines));
    groups.push(("NCCL".into(), seat.group("nccl", terms(Way::Nccl, 5000), &memory)?, Group::issue));
    if seat.me == 0 {
        let names: String = groups.iter().map(|(n, ..)| format!("{n:>18}")).collect();
        println!("     µs per op in a graph of 20, bf16, {} GPUs (GB/s of the bus)", seat.members);
        println!("     {:<24}{names}", "");
    }
    let (me, members) = (seat.me, seat.members);
    let sizes = [8 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20, 48 << 20];
    for what in ["all_reduce", "all_to_all"] {
        for size in sizes.into_iter().filter(|s| *s <= most) {
            let columns = if size >= 512 << 10 && 5120 % members == 0 { 5120 } else { 128 * members };
            let rows = size / 2 / columns * members;
            let (kind, bytes) = if what == "all_reduce" {
                (Kind::AllReduce { elements: size / 2, reduction: Reduction::Sum }, size)
            } else {
                let (concat, split) = (cut(rows, members, true), cut(columns, members, true));
                (Kind::all_to_all(me, (rows, columns), 0, &concat, &split, 2), rows * columns / members * 2)
            };
            let places = [0, most as u64 + (2 << 20)];
            let m = Move {
                kind,
                dtype: DType::Bf16,
                operand: memory.at() + places[0],
                result: memory.at() + places[1],
                peers_operand: vec![places[0]; members],
                peers_result: vec![places[1]; members],
                fingerprint: size as u32,
                op: 1,
                via: Via::Best,
            };
            let mut line = format!("     {what} {:>8} KiB   ", bytes >> 10);
            for (_, group, issue) in &mut groups {
                let us = time(group, *issue, &m, &stream)?;
                let share = (members - 1) as f64 / members as f64;
                let moved = bytes as f64 * share * if what == "all_reduce" { 2.0 } else { 1.0 };
                line += &format!("{us:>10.1} ({:>4.0}) ", moved / us / 1e3);
            }
            if me == 0 {
                println!("{line}");
            }
        }
    }
    Ok(true)
}

/// Median over replays, in µs per op.
fn time(group: &mut Group, issue: Issue, m: &Move, stream: &Stream) -> Done<f64> {
    const OPS: usize = 20;
    issue(group, m, stream)?;
    drained(group, stream, 15)?;
    stream.begin_capture()?;
    let issued = (0..OPS).try_for_each(|_| issue(group, m, stream));
    let graph = stream.end_capture()?;
    issued?;
    let events =
        (0..36).map(|_| Ok((Event::timed()?, Event::timed()?))).collect::<Done<Vec<(Event, Event)>>>()?;
    for (begin, end) in &events {
        stream.record(begin)?;
        stream.replay(&graph)?;
        stream.record(end)?;
    }
    drained(group, stream, 30)?;
    let each = events.iter().skip(5).map(|(begin, end)| begin.until_ms(end));
    let mut each = each.collect::<Done<Vec<f32>>>()?;
    each.sort_by(f32::total_cmp);
    Ok(f64::from(each[each.len() / 2]) * 1e3 / OPS as f64)
}

// What goes wrong.

fn faults(seat: &mut Seat, scene: &str) -> Done<bool> {
    let memory = Memory::new(4 << 20)?;
    let (way, patience_ms) = match scene {
        "abort" => (Way::Peers, 30_000),
        "abort-nccl" => (Way::Nccl, 30_000),
        _ => (Way::Peers, 1000),
    };
    let mut group = seat.group("all", terms(way, patience_ms), &memory)?;
    let stream = Stream::new(true)?;
    let (me, last) = (seat.me, seat.members - 1);
    let result = memory.at() + (2 << 20);
    let mut m = Move {
        kind: Kind::AllReduce { elements: 100_000, reduction: Reduction::Sum },
        dtype: DType::Bf16,
        operand: memory.at(),
        result,
        peers_operand: vec![0; seat.members],
        peers_result: vec![2 << 20; seat.members],
        fingerprint: 0,
        op: 0,
        via: Via::Best,
    };
    memory.zero()?;
    for op in 0..3 {
        (m.op, m.fingerprint) = (op, 70 + op);
        group.issue(&m, &stream)?;
    }
    drained(&group, &stream, 10)?;
    group.table(&[1])?;
    upload(result, &[0xcd_u8; 64])?;
    (m.op, m.fingerprint) = (345, 415);
    if me == last {
        match scene {
            "late" => std::thread::sleep(Duration::from_millis(400)),
            "other" => (m.op, m.fingerprint) = (346, 416),
            // The others are to say what they miss; only then everything is over.
            _ => {
                std::thread::sleep(Duration::from_millis(2500));
                let ended = group.aborter().abort(Duration::from_secs(3));
                return Ok(said(scene, me, &format!("NCCL ended: {ended}"), ended));
            }
        }
    }
    let began = Instant::now();
    group.issue(&m, &stream)?;
    // What comes after a fault neither waits nor moves anything.
    if scene == "skip" {
        group.issue(&Move { op: 346, ..m.clone() }, &stream)?;
    }
    if scene.starts_with("abort") {
        std::thread::sleep(Duration::from_millis(300));
        if empty(&stream)? {
            return Ok(said(scene, me, "the collective ended without its last member", false));
        }
        let aborter = group.aborter();
        let began = Instant::now();
        let thread = std::thread::spawn(move || (aborter.abort(Duration::from_secs(3)), began.elapsed()));
        let drained = drained_in(&stream, 5)?;
        let (ended, all) = thread.join().unwrap_or((false, Duration::ZERO));
        let text = format!(
            "drained in {:.1} ms, NCCL ended: {ended} in {:.1} ms; fault {:?}, {:?}",
            drained.as_secs_f64() * 1e3,
            all.as_secs_f64() * 1e3,
            group.fault(),
            group.progress(),
        );
        let right = match way {
            Way::Peers => {
                drained < Duration::from_millis(100) && group.fault() == Some(GroupFault::Aborted { op: 345 })
            }
            _ => drained < Duration::from_secs(3),
        };
        return Ok(said(scene, me, &text, right && ended));
    }
    drained_in(&stream, 10)?;
    let took = began.elapsed().as_millis();
    let fault = group.fault();
    let mut got = [0_u8; 64];
    download(&mut got, result)?;
    let untouched = got == [0xcd; 64];
    let right = match (scene, &fault) {
        ("late", None) => !untouched,
        ("skip", Some(GroupFault::Timeout { op: 345, peers, .. })) => {
            *peers == [last] && untouched && (900..1600).contains(&took)
        }
        ("other", Some(GroupFault::Mismatch { op, peer, mine, theirs })) => {
            let expected = if me == last { (346, 0, 416, 415) } else { (345, last, 415, 416) };
            (*op, *peer, *mine, *theirs) == expected && untouched && took < 500
        }
        _ => false,
    };
    let fault = fault.map_or("no fault".into(), |f| f.to_string());
    Ok(said(scene, me, &format!("after {took} ms: {fault}; {:?}", group.progress()), right))
}

fn said(scene: &str, me: usize, text: &str, right: bool) -> bool {
    println!("{} {scene}: member {me}: {text}", if right { "PASS" } else { "FAIL" });
    right
}

// Small help.

fn empty(stream: &Stream) -> Done<bool> {
    let event = Event::new()?;
    stream.record(&event)?;
    event.passed()
}

/// Waits for a stream; a group that has failed is an error.
fn drained(group: &Group, stream: &Stream, seconds: u64) -> Done<()> {
    let took = drained_in(stream, seconds);
    match group.fault() {
        Some(fault) => failed(fault.to_string()),
        None => took.map(|_| ()),
    }
}

fn drained_in(stream: &Stream, seconds: u64) -> Done<Duration> {
    let event = Event::new()?;
    stream.record(&event)?;
    let began = Instant::now();
    while !event.passed()? {
        if began.elapsed().as_secs() >= seconds {
            return failed(format!("the device is not through after {seconds} s"));
        }
        std::thread::yield_now();
    }
    Ok(began.elapsed())
}
