//! Tests collectives between the GPUs of this host over P2P memory and over NCCL, and measures
//! their speed: `cargo run --release -p tessera-cuda --example exchange -- --gpus N`. The
//! environment variable TESSERA_CUDA_LIBS lists the folders of the libraries.
//!
//! The program starts itself once per GPU and scenario, compares every result with a computation on
//! the host, and exits with 0 only if all scenarios pass. It kills scenarios that exceed their time
//! limit.
#![allow(dead_code, reason = "includes the crate's own sources and uses only part of them")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use tessera_ir::DType;
use tessera_mesh::Reduction;

#[path = "../../src/collectives/mod.rs"]
mod collectives;
#[path = "../../src/compile.rs"]
mod compile;
#[path = "../../src/driver.rs"]
mod driver;
#[path = "../../src/dylib.rs"]
mod dylib;
#[path = "../../src/libraries.rs"]
mod libraries;
#[path = "../../src/nccl.rs"]
mod nccl;

mod values;

use collectives::{
    CollectiveGroup, CollectiveKind, GroupCollective, GroupConfig, GroupFault, GroupTransport,
    RequestedTransport,
};
use compile::{Compiler, KernelCache};
use driver::{
    Context, CudaEvent, CudaResult, CudaStream, DeviceMemory, copy_to_device, copy_to_host, cuda_failure,
};
use libraries::Libraries;
use nccl::{UniqueId, unique_id};
use values::{from_bytes, reference_reduce, split_extent, take_range, test_data, to_bytes};

/// Name and time limit in seconds of each scenario.
const SCENARIOS: [(&str, u64); 8] = [
    ("p2p", 150),
    ("nccl", 150),
    ("delayed-member", 40),
    ("missing-member", 40),
    ("mismatch", 40),
    ("abort", 40),
    ("abort-nccl", 40),
    ("speed", 240),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, me, members, scenario, mib, folder] = &args[..]
        && flag == "--member"
    {
        let number = |t: &String| t.parse::<usize>().unwrap_or(0);
        let seat = MemberProcess::open(number(me), number(members), Path::new(folder), scenario);
        let passed = seat.and_then(|mut seat| run_member(&mut seat, scenario, number(mib)));
        let code = match passed {
            Ok(true) => 0,
            Ok(false) => 1,
            Err(e) => {
                println!("FAIL {scenario}: member {me}: {e}");
                1
            }
        };
        // Exits without running destructors: they would wait for work that is stuck on the device.
        std::process::exit(code);
    }
    let value = |flag: &str| args.iter().position(|a| a == flag).and_then(|i| args.get(i + 1));
    let gpus: usize = value("--gpus").and_then(|v| v.parse().ok()).unwrap_or(2);
    let mib: usize = value("--mib").and_then(|v| v.parse().ok()).unwrap_or(48);
    let only = value("--scenario");
    let folder = std::env::temp_dir().join(format!("exchange-{}", std::process::id()));
    if let Err(e) = std::fs::create_dir_all(&folder) {
        println!("FAIL {}: {e}", folder.display());
        return ExitCode::FAILURE;
    }
    let mut passed = true;
    for (scenario, seconds) in SCENARIOS.into_iter().filter(|(s, _)| only.is_none_or(|o| o == s)) {
        let began = Instant::now();
        let whole = run_scenario(scenario, seconds, gpus, mib, &folder);
        println!(
            "{} scenario {scenario} ({:.1} s)",
            if whole { "PASS" } else { "FAIL" },
            began.elapsed().as_secs_f64()
        );
        passed &= whole;
    }
    let _ = std::fs::remove_dir_all(&folder);
    println!("{}", if passed { "PASS all" } else { "FAIL" });
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs one scenario with one process per GPU; returns whether all of them succeed in time.
fn run_scenario(scenario: &str, seconds: u64, gpus: usize, mib: usize, folder: &Path) -> bool {
    let Ok(exe) = std::env::current_exe() else { return false };
    let mut children: Vec<Child> = Vec::new();
    for me in 0..gpus {
        let mut command = Command::new(&exe);
        command
            .arg("--member")
            .args([me, gpus].map(|n| n.to_string()))
            .arg(scenario)
            .arg(mib.to_string())
            .arg(folder);
        command.env("NCCL_NVLS_ENABLE", "0");
        match command.spawn() {
            Ok(child) => children.push(child),
            Err(e) => println!("FAIL {scenario}: member {me} does not start: {e}"),
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
                    println!("FAIL {scenario}: member {me} has not ended after {seconds} s");
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

/// Kernel cache on disk, shared by the processes of this run.
#[derive(Debug)]
struct DiskKernelCache(PathBuf);

impl KernelCache for DiskKernelCache {
    fn load(&self, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.0.join(name)).ok()
    }

    fn save(&self, name: &str, image: &[u8]) {
        let part = self.0.join(format!("{name}.part{}", std::process::id()));
        let _ = std::fs::create_dir_all(&self.0)
            .and_then(|()| std::fs::write(&part, image))
            .and_then(|()| std::fs::rename(&part, self.0.join(name)));
    }
}

/// One process: a GPU and its resources.
struct MemberProcess {
    member: usize,
    member_count: usize,
    folder: PathBuf,
    scenario: String,
    libraries: Libraries,
    context: Context,
    compiler: Compiler,
}

impl MemberProcess {
    fn open(me: usize, members: usize, folder: &Path, scenario: &str) -> CudaResult<MemberProcess> {
        let told = std::env::var_os("TESSERA_CUDA_LIBS").unwrap_or_default();
        let libraries = Libraries::load(&std::env::split_paths(&told).collect::<Vec<PathBuf>>());
        for lost in &libraries.missing {
            let needed = ["libcuda.so.1", "libnvrtc.so.13", "libnccl.so.2"];
            if needed.contains(&lost.library.file_name()) {
                return cuda_failure(lost.to_diagnostic().message);
            }
        }
        let context = Context::open(me as u32)?;
        let nvrtc = dylib::Nvrtc::load(&libraries).or_else(|d| cuda_failure(d.message))?;
        let kept = Arc::new(DiskKernelCache(folder.join("kernels")));
        let compiler = Compiler::new(nvrtc, (9, 0), Some(kept))?;
        Ok(MemberProcess {
            member: me,
            member_count: members,
            folder: folder.into(),
            scenario: scenario.into(),
            libraries,
            context,
            compiler,
        })
    }

    /// Joins the group of a name and shares exchange memory with it.
    fn join_group(
        &mut self,
        name: &str,
        terms: GroupConfig,
        memory: &DeviceMemory,
    ) -> CudaResult<CollectiveGroup> {
        let file = self.folder.join(format!("id-{}-{name}", self.scenario));
        let id = if self.member == 0 {
            let id = unique_id(&self.libraries).or_else(|d| cuda_failure(d.message))?;
            let part = file.with_extension("part");
            let written = std::fs::write(&part, id.0).and_then(|()| std::fs::rename(&part, &file));
            written.or_else(|e| cuda_failure(e.to_string()))?;
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
                    return cuda_failure("member 0 did not publish its NCCL id");
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        };
        let abort = Arc::new(AtomicBool::new(false));
        let place = (self.member, self.member_count);
        let began = Instant::now();
        let mut group =
            CollectiveGroup::join_members(&self.libraries, &mut self.compiler, &id, place, terms, abort)?;
        let met = began.elapsed();
        group.share_memory(memory)?;
        if self.member == 0 {
            println!(
                "     {}: group {name} of {} uses {:?} after {} + {} ms{}",
                self.scenario,
                self.member_count,
                group.active_transport(),
                met.as_millis(),
                (began.elapsed() - met).as_millis(),
                group.p2p_failure().map(|w| format!(" ({w})")).unwrap_or_default(),
            );
        }
        Ok(group)
    }
}

fn group_config(transport: GroupTransport, patience_ms: u64) -> GroupConfig {
    GroupConfig {
        transport,
        max_blocks: 24,
        peer_timeout: Duration::from_millis(patience_ms),
        setup_timeout: Duration::from_secs(30),
        host_id: host_id(),
        staging_bytes: [256 << 20; 2],
    }
}

/// Returns a number that identifies this host's boot.
fn host_id() -> u64 {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    boot.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

fn run_member(seat: &mut MemberProcess, scenario: &str, mib: usize) -> CudaResult<bool> {
    match scenario {
        "p2p" => check_all_kinds(seat, GroupTransport::P2p),
        "nccl" => check_all_kinds(seat, GroupTransport::Nccl),
        "speed" => measure_speed(seat, mib << 20),
        _ => check_faults(seat, scenario),
    }
}

// Tests of every kind of collective.

/// One collective, from the view of one member.
struct CollectiveCase {
    name: String,
    dtype: DType,
    kind: CollectiveKind,
    operand: Vec<f32>,
    want: Vec<f32>,
    /// Bytes by which operands and results are misaligned.
    misalignment: usize,
    /// Absolute tolerance for results of NCCL; `None` requires equal bits.
    tolerance: Option<f32>,
}

/// Offset of the results in exchange memory.
const RESULTS_OFFSET: usize = 96 << 20;
const GUARD_BYTES: usize = 64;

fn check_all_kinds(seat: &mut MemberProcess, way: GroupTransport) -> CudaResult<bool> {
    let memory = DeviceMemory::new(2 * RESULTS_OFFSET)?;
    let mut group = seat.join_group("all", group_config(way, 5000), &memory)?;
    let stream = CudaStream::new(true)?;
    let mut passed = true;
    let mut op = 0;
    let cases = build_cases(seat.member, seat.member_count, way);
    let count = cases.len();
    for case in cases {
        op += 1;
        if let Err(e) = try_case(seat, &mut group, &memory, &stream, &case, op) {
            println!("FAIL {way:?} {}: member {}: {e}", case.name, seat.member);
            passed = false;
            if let Some(fault) = group.find_fault() {
                println!("     member {}: {fault}; {:?}", seat.member, group.read_progress());
                return Ok(false);
            }
        }
    }
    let there = [CollectiveGroup::enqueue_collective, enqueue_with_copy_engines]
        .into_iter()
        .try_for_each(|issue: EnqueueFn| check_round_trip(seat, &mut group, &memory, issue, &stream));
    if let Err(e) = &there {
        println!("FAIL {way:?} round trip: member {}: {e}", seat.member);
    }
    if seat.member == 0 && passed && there.is_ok() {
        println!(
            "PASS {way:?}: {count} collectives, eager and replayed, and round trips of 40 that reuse operands"
        );
    }
    Ok(passed && there.is_ok())
}

fn try_case(
    seat: &MemberProcess,
    group: &mut CollectiveGroup,
    memory: &DeviceMemory,
    stream: &CudaStream,
    case: &CollectiveCase,
    op: u32,
) -> CudaResult<()> {
    let operand_at = 4096 + 256 * seat.member + case.misalignment;
    let result_at = RESULTS_OFFSET + 4096 + 512 * seat.member + case.misalignment;
    let places = group.exchange_table(&[operand_at as u64, result_at as u64])?;
    let m = GroupCollective {
        kind: case.kind.clone(),
        dtype: case.dtype,
        operand: memory.device_address() + operand_at as u64,
        result: memory.device_address() + result_at as u64,
        peer_operand_offsets: places.iter().map(|p| p[0]).collect(),
        peer_result_offsets: places.iter().map(|p| p[1]).collect(),
        fingerprint: 0x5eed_0000 + op,
        op_index: op,
        transport: RequestedTransport::Best,
    };
    if m.staging_bytes(seat.member) > 256 << 20 {
        return cuda_failure("the case exceeds the staging memory");
    }
    let want = to_bytes(&case.want, case.dtype);
    let poison = vec![0xcd_u8; want.len() + 2 * GUARD_BYTES];
    copy_to_device(m.operand, &to_bytes(&case.operand, case.dtype))?;
    copy_to_device(m.result - GUARD_BYTES as u64, &poison)?;
    group.enqueue_collective(&m, stream)?;
    wait_until_idle(group, stream, 15)?;
    check_result(case, &m, &want, "eager")?;
    copy_to_device(m.result - GUARD_BYTES as u64, &poison)?;
    stream.begin_capture()?;
    let issued = group.enqueue_collective(&m, stream);
    let graph = stream.end_capture()?;
    issued?;
    for _ in 0..20 {
        stream.launch_graph(&graph)?;
    }
    wait_until_idle(group, stream, 15)?;
    check_result(case, &m, &want, "replayed")
}

fn check_result(case: &CollectiveCase, m: &GroupCollective, want: &[u8], how: &str) -> CudaResult<()> {
    let mut got = vec![0_u8; want.len() + 2 * GUARD_BYTES];
    copy_to_host(&mut got, m.result - GUARD_BYTES as u64)?;
    let (before, rest) = got.split_at(GUARD_BYTES);
    let (got, after) = rest.split_at(want.len());
    if before.iter().chain(after).any(|b| *b != 0xcd) {
        return cuda_failure(format!("{how}: bytes outside the result were overwritten"));
    }
    let (got, want) = (from_bytes(got, case.dtype), from_bytes(want, case.dtype));
    let differs = |g: f32, w: f32| match case.tolerance {
        _ if g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan()) => false,
        None => true,
        Some(near) => (g - w).abs() > near || g.is_nan(),
    };
    let wrong: Vec<usize> = (0..want.len()).filter(|i| differs(got[*i], want[*i])).collect();
    match wrong.first() {
        None => Ok(()),
        Some(i) => cuda_failure(format!(
            "{how}: {} of {} elements differ, first element {i}: {:e} instead of {:e}",
            wrong.len(),
            want.len(),
            got[*i],
            want[*i]
        )),
    }
}

fn build_cases(me: usize, members: usize, way: GroupTransport) -> Vec<CollectiveCase> {
    let mut out = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        let (name, element) = (dtype.name(), dtype.element_bytes() as usize);
        let case = |name: String, kind: CollectiveKind, operand: Vec<f32>, want: Vec<f32>| {
            let near = None;
            CollectiveCase { name, dtype, kind, operand, want, misalignment: 0, tolerance: near }
        };
        for reduction in [Reduction::Sum, Reduction::Tree, Reduction::Max] {
            let near = match (way, reduction) {
                (GroupTransport::P2p, _) | (_, Reduction::Max) => None,
                _ if dtype == DType::F32 => Some(1e-6 * (members * members) as f32),
                _ => Some(8e-3 * (members * members) as f32),
            };
            let word = reduction.name();
            for (seed, elements) in
                [1, 7, 1000, 8192, 40_000, 65_536, 1_000_003, 1 << 21].into_iter().enumerate()
            {
                let strange = reduction == Reduction::Max && way == GroupTransport::P2p;
                let all: Vec<Vec<f32>> =
                    (0..members).map(|m| test_data(seed, m, elements, dtype, strange)).collect();
                let want = reference_reduce(&all, reduction, dtype);
                let name = format!("all_reduce {word} {name} of {elements}");
                let kind = CollectiveKind::AllReduce { elements, reduction };
                for askew in [0, element] {
                    let name = if askew > 0 { format!("{name} askew") } else { name.clone() };
                    out.push(CollectiveCase {
                        misalignment: askew,
                        tolerance: near,
                        ..case(name, kind.clone(), all[me].clone(), want.clone())
                    });
                }
            }
            for (shape, dim) in [((37, 24), 0), ((16, 64), 0), ((37, 24), 1), ((5, 17), 1), ((300, 1024), 1)]
            {
                for even in [false, true] {
                    let extent = [shape.0, shape.1][dim];
                    if even && extent % members != 0 {
                        continue;
                    }
                    let parts = split_extent(extent, members, even);
                    let all: Vec<Vec<f32>> =
                        (0..members).map(|m| test_data(90, m, shape.0 * shape.1, dtype, false)).collect();
                    let want = take_range(&reference_reduce(&all, reduction, dtype), shape, dim, &parts[me]);
                    let (rows, columns) = shape;
                    let kind = CollectiveKind::ReduceScatter { rows, columns, dim, parts, reduction };
                    let name = format!("reduce_scatter {word} {name} {shape:?} dim {dim} even {even}");
                    out.push(CollectiveCase { tolerance: near, ..case(name, kind, all[me].clone(), want) });
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
                let parts = split_extent(extent, members, even);
                let whole = test_data(91, 0, shape.0 * shape.1, dtype, false);
                let kind = CollectiveKind::all_gather(me, shape, dim, &parts, element);
                let name = format!("all_gather {name} {shape:?} dim {dim} even {even}");
                out.push(case(name, kind, take_range(&whole, shape, dim, &parts[me]), whole.clone()));
            }
        }
        for shape in [(37, 29), (64, 64), (17, 130), (2160, 2560)] {
            for (concat_dim, even) in [(0, false), (0, true), (1, false), (1, true)] {
                let extents = [shape.0, shape.1];
                if even && extents.iter().any(|e| e % members != 0) {
                    continue;
                }
                let concat = split_extent(extents[concat_dim], members, even);
                let split = split_extent(extents[1 - concat_dim], members, even);
                let whole = test_data(92, 0, shape.0 * shape.1, dtype, false);
                let kind = CollectiveKind::all_to_all(me, shape, concat_dim, &concat, &split, element);
                let name = format!("all_to_all {name} {shape:?} dim {concat_dim} even {even}");
                let operand = take_range(&whole, shape, concat_dim, &concat[me]);
                out.push(case(name, kind, operand, take_range(&whole, shape, 1 - concat_dim, &split[me])));
            }
        }
        for elements in [1, 999, 100_000] {
            let root = members - 1;
            let whole = test_data(93, root, elements, dtype, false);
            let kind = CollectiveKind::broadcast_from(me, members, root, elements * element);
            let operand = if me == root { whole.clone() } else { Vec::new() };
            out.push(case(format!("broadcast {name} of {elements}"), kind, operand, whole.clone()));
            if members == 2 {
                let kind = CollectiveKind::send_recv(me, elements * element);
                let (operand, want) = if me == 0 { (whole, Vec::new()) } else { (Vec::new(), whole) };
                out.push(case(format!("transfer {name} of {elements}"), kind, operand, want));
            }
        }
    }
    out
}

/// Function that enqueues a collective.
type EnqueueFn = fn(&mut CollectiveGroup, &GroupCollective, &CudaStream) -> CudaResult<()>;

/// Enqueues copies by the DMA copy engines with P2P memory; other collectives are enqueued as
/// usual.
fn enqueue_with_copy_engines(
    group: &mut CollectiveGroup,
    m: &GroupCollective,
    stream: &CudaStream,
) -> CudaResult<()> {
    if group.active_transport() != GroupTransport::P2p || !matches!(m.kind, CollectiveKind::Copy { .. }) {
        return group.enqueue_collective(m, stream);
    }
    group.enqueue_open(m, stream)?;
    group.enqueue_copies(m, stream)?;
    group.enqueue_close(m, stream)
}

/// Enqueues an all-to-all and its inverse, twenty times each in one graph that is replayed twenty
/// times. An operand that is overwritten too early or a result that is read too early would change
/// the data.
fn check_round_trip(
    seat: &MemberProcess,
    group: &mut CollectiveGroup,
    memory: &DeviceMemory,
    issue: EnqueueFn,
    stream: &CudaStream,
) -> CudaResult<()> {
    let (me, members) = (seat.member, seat.member_count);
    let shape = (members * 96, members * 128);
    let (rows, columns) = (split_extent(shape.0, members, true), split_extent(shape.1, members, true));
    let whole = test_data(94, 0, shape.0 * shape.1, DType::Bf16, false);
    let mine = to_bytes(&take_range(&whole, shape, 0, &rows[me]), DType::Bf16);
    let places = [4096 + 256 * me as u64, (RESULTS_OFFSET + 512 * me) as u64];
    let table = group.exchange_table(&places)?;
    let column = |i: usize| table.iter().map(|p| p[i]).collect::<Vec<u64>>();
    let step = |way: usize| GroupCollective {
        kind: match way {
            0 => CollectiveKind::all_to_all(me, shape, 0, &rows, &columns, 2),
            _ => CollectiveKind::all_to_all(me, shape, 1, &columns, &rows, 2),
        },
        dtype: DType::Bf16,
        operand: memory.device_address() + places[way],
        result: memory.device_address() + places[1 - way],
        peer_operand_offsets: column(way),
        peer_result_offsets: column(1 - way),
        fingerprint: 0xba5e + way as u32,
        op_index: 9000 + way as u32,
        transport: RequestedTransport::Best,
    };
    copy_to_device(memory.device_address() + places[0], &mine)?;
    for way in [0, 1] {
        issue(group, &step(way), stream)?;
    }
    wait_until_idle(group, stream, 15)?;
    stream.begin_capture()?;
    let issued = (0..40).try_for_each(|i| issue(group, &step(i % 2), stream));
    let graph = stream.end_capture()?;
    issued?;
    for _ in 0..20 {
        stream.launch_graph(&graph)?;
    }
    wait_until_idle(group, stream, 15)?;
    let mut got = vec![0_u8; mine.len()];
    copy_to_host(&mut got, memory.device_address() + places[0])?;
    if got == mine { Ok(()) } else { cuda_failure("the round trip changed the data") }
}

// Speed measurement.

fn measure_speed(seat: &mut MemberProcess, most: usize) -> CudaResult<bool> {
    let memory = DeviceMemory::new(2 * most + (4 << 20))?;
    let stream = CudaStream::new(true)?;
    let mut groups: Vec<(String, CollectiveGroup, EnqueueFn)> = Vec::new();
    for blocks in [8, 16, 24, 32] {
        let terms = GroupConfig { max_blocks: blocks, ..group_config(GroupTransport::P2p, 5000) };
        let group = seat.join_group(&format!("p{blocks}"), terms, &memory)?;
        groups.push((format!("peers {blocks}"), group, CollectiveGroup::enqueue_collective));
    }
    let group = seat.join_group("engines", group_config(GroupTransport::P2p, 5000), &memory)?;
    groups.push(("engines".into(), group, enqueue_with_copy_engines));
    groups.push((
        "NCCL".into(),
        seat.join_group("nccl", group_config(GroupTransport::Nccl, 5000), &memory)?,
        CollectiveGroup::enqueue_collective,
    ));
    if seat.member == 0 {
        let names: String = groups.iter().map(|(n, ..)| format!("{n:>18}")).collect();
        println!(
            "     µs per op in a graph of 20 ops, bf16, {} GPUs (bus bandwidth in GB/s)",
            seat.member_count
        );
        println!("     {:<24}{names}", "");
    }
    let (me, members) = (seat.member, seat.member_count);
    let sizes = [8 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20, 48 << 20];
    for what in ["all_reduce", "all_to_all"] {
        for size in sizes.into_iter().filter(|s| *s <= most) {
            let columns = if size >= 512 << 10 && 5120 % members == 0 { 5120 } else { 128 * members };
            let rows = size / 2 / columns * members;
            let (kind, bytes) = if what == "all_reduce" {
                (CollectiveKind::AllReduce { elements: size / 2, reduction: Reduction::Sum }, size)
            } else {
                let (concat, split) =
                    (split_extent(rows, members, true), split_extent(columns, members, true));
                (
                    CollectiveKind::all_to_all(me, (rows, columns), 0, &concat, &split, 2),
                    rows * columns / members * 2,
                )
            };
            let places = [0, most as u64 + (2 << 20)];
            let m = GroupCollective {
                kind,
                dtype: DType::Bf16,
                operand: memory.device_address() + places[0],
                result: memory.device_address() + places[1],
                peer_operand_offsets: vec![places[0]; members],
                peer_result_offsets: vec![places[1]; members],
                fingerprint: size as u32,
                op_index: 1,
                transport: RequestedTransport::Best,
            };
            let mut line = format!("     {what} {:>8} KiB   ", bytes >> 10);
            for (_, group, issue) in &mut groups {
                let us = median_op_time(group, *issue, &m, &stream)?;
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

/// Returns the median time per op over replays, in µs.
fn median_op_time(
    group: &mut CollectiveGroup,
    issue: EnqueueFn,
    m: &GroupCollective,
    stream: &CudaStream,
) -> CudaResult<f64> {
    const OPS: usize = 20;
    issue(group, m, stream)?;
    wait_until_idle(group, stream, 15)?;
    stream.begin_capture()?;
    let issued = (0..OPS).try_for_each(|_| issue(group, m, stream));
    let graph = stream.end_capture()?;
    issued?;
    let events = (0..36)
        .map(|_| Ok((CudaEvent::with_timing()?, CudaEvent::with_timing()?)))
        .collect::<CudaResult<Vec<(CudaEvent, CudaEvent)>>>()?;
    for (begin, end) in &events {
        stream.record_event(begin)?;
        stream.launch_graph(&graph)?;
        stream.record_event(end)?;
    }
    wait_until_idle(group, stream, 30)?;
    let each = events.iter().skip(5).map(|(begin, end)| begin.elapsed_ms_to(end));
    let mut each = each.collect::<CudaResult<Vec<f32>>>()?;
    each.sort_by(f32::total_cmp);
    Ok(f64::from(each[each.len() / 2]) * 1e3 / OPS as f64)
}

// Fault scenarios.

fn check_faults(seat: &mut MemberProcess, scenario: &str) -> CudaResult<bool> {
    let memory = DeviceMemory::new(4 << 20)?;
    let (way, patience_ms) = match scenario {
        "abort" => (GroupTransport::P2p, 30_000),
        "abort-nccl" => (GroupTransport::Nccl, 30_000),
        _ => (GroupTransport::P2p, 1000),
    };
    let mut group = seat.join_group("all", group_config(way, patience_ms), &memory)?;
    let stream = CudaStream::new(true)?;
    let (me, last) = (seat.member, seat.member_count - 1);
    let result = memory.device_address() + (2 << 20);
    let mut m = GroupCollective {
        kind: CollectiveKind::AllReduce { elements: 100_000, reduction: Reduction::Sum },
        dtype: DType::Bf16,
        operand: memory.device_address(),
        result,
        peer_operand_offsets: vec![0; seat.member_count],
        peer_result_offsets: vec![2 << 20; seat.member_count],
        fingerprint: 0,
        op_index: 0,
        transport: RequestedTransport::Best,
    };
    memory.zero_fill()?;
    for op in 0..3 {
        (m.op_index, m.fingerprint) = (op, 70 + op);
        group.enqueue_collective(&m, &stream)?;
    }
    wait_until_idle(&group, &stream, 10)?;
    group.exchange_table(&[1])?;
    copy_to_device(result, &[0xcd_u8; 64])?;
    (m.op_index, m.fingerprint) = (345, 415);
    if me == last {
        match scenario {
            "delayed-member" => std::thread::sleep(Duration::from_millis(400)),
            "mismatch" => (m.op_index, m.fingerprint) = (346, 416),
            // The peers must report the missing member before it exits.
            _ => {
                std::thread::sleep(Duration::from_millis(2500));
                let ended = group.new_aborter().abort_within(Duration::from_secs(3));
                return Ok(report_result(scenario, me, &format!("NCCL aborted: {ended}"), ended));
            }
        }
    }
    let began = Instant::now();
    group.enqueue_collective(&m, &stream)?;
    // After a fault, later collectives neither wait nor move data.
    if scenario == "missing-member" {
        group.enqueue_collective(&GroupCollective { op_index: 346, ..m.clone() }, &stream)?;
    }
    if scenario.starts_with("abort") {
        std::thread::sleep(Duration::from_millis(300));
        if is_idle(&stream)? {
            return Ok(report_result(
                scenario,
                me,
                "the collective completed without its last member",
                false,
            ));
        }
        let aborter = group.new_aborter();
        let began = Instant::now();
        let thread =
            std::thread::spawn(move || (aborter.abort_within(Duration::from_secs(3)), began.elapsed()));
        let drained = wait_idle_within(&stream, 5)?;
        let (ended, all) = thread.join().unwrap_or((false, Duration::ZERO));
        let text = format!(
            "drained in {:.1} ms, NCCL aborted: {ended} in {:.1} ms; fault {:?}, {:?}",
            drained.as_secs_f64() * 1e3,
            all.as_secs_f64() * 1e3,
            group.find_fault(),
            group.read_progress(),
        );
        let right = match way {
            GroupTransport::P2p => {
                drained < Duration::from_millis(100)
                    && group.find_fault() == Some(GroupFault::Aborted { op: 345 })
            }
            _ => drained < Duration::from_secs(3),
        };
        return Ok(report_result(scenario, me, &text, right && ended));
    }
    wait_idle_within(&stream, 10)?;
    let took = began.elapsed().as_millis();
    let fault = group.find_fault();
    let mut got = [0_u8; 64];
    copy_to_host(&mut got, result)?;
    let untouched = got == [0xcd; 64];
    let right = match (scenario, &fault) {
        ("delayed-member", None) => !untouched,
        ("missing-member", Some(GroupFault::Timeout { op: 345, peers, .. })) => {
            *peers == [last] && untouched && (900..1600).contains(&took)
        }
        ("mismatch", Some(GroupFault::Mismatch { op, peer, mine, theirs })) => {
            let expected = if me == last { (346, 0, 416, 415) } else { (345, last, 415, 416) };
            (*op, *peer, *mine, *theirs) == expected && untouched && took < 500
        }
        _ => false,
    };
    let fault = fault.map_or("no fault".into(), |f| f.to_string());
    Ok(report_result(scenario, me, &format!("after {took} ms: {fault}; {:?}", group.read_progress()), right))
}

fn report_result(scenario: &str, me: usize, text: &str, right: bool) -> bool {
    println!("{} {scenario}: member {me}: {text}", if right { "PASS" } else { "FAIL" });
    right
}

// Helpers.

fn is_idle(stream: &CudaStream) -> CudaResult<bool> {
    let event = CudaEvent::new()?;
    stream.record_event(&event)?;
    event.is_complete()
}

/// Waits until a stream is idle. A fault of the group is an error.
fn wait_until_idle(group: &CollectiveGroup, stream: &CudaStream, seconds: u64) -> CudaResult<()> {
    let took = wait_idle_within(stream, seconds);
    match group.find_fault() {
        Some(fault) => cuda_failure(fault.to_string()),
        None => took.map(|_| ()),
    }
}

fn wait_idle_within(stream: &CudaStream, seconds: u64) -> CudaResult<Duration> {
    let event = CudaEvent::new()?;
    stream.record_event(&event)?;
    let began = Instant::now();
    while !event.is_complete()? {
        if began.elapsed().as_secs() >= seconds {
            return cuda_failure(format!("the device is still busy after {seconds} s"));
        }
        std::thread::yield_now();
    }
    Ok(began.elapsed())
}
