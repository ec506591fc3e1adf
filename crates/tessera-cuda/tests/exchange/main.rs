//! Tests collectives between the GPUs of this host over P2P memory and over NCCL, and measures
//! their speed: `cargo test --release -p tessera-cuda --test exchange -- --gpus N`. Without `--gpus` it
//! tests nothing. The environment variable TESSERA_CUDA_LIBS lists the folders of the libraries.
//!
//! The program starts itself once per GPU and scenario, compares every result with a computation on
//! the host, and exits with 0 only if all scenarios pass. It kills scenarios that exceed their time
//! limit.
//!
//! Operands and results lie in the exchange memory of a member, which lives until the process exits,
//! and a single stream uses them. All SAFETY notes of this file rest on these two facts.
#![allow(unsafe_code, reason = "collectives on raw addresses")]
#![allow(clippy::disallowed_methods, reason = "a program reads its arguments and keeps files")]
#![allow(dead_code, reason = "includes the crate's own sources and uses only part of them")]
#![allow(unused_imports, reason = "the tests in these sources run with the crate")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use tessera_ir::DType;
use tessera_mesh::Reduction;

/// The crate's own sources, whose items are private to it.
#[path = "../../src"]
mod cuda {
    pub(crate) mod allocation_lock;
    pub(crate) mod codes;
    pub(crate) mod collectives;
    pub(crate) mod compile;
    pub(crate) mod cubin;
    pub(crate) mod device_memory;
    pub(crate) mod driver;
    pub(crate) mod dylib;
    pub(crate) mod kernel_params;
    pub(crate) mod libraries;
    pub(crate) mod nccl;
    pub(crate) mod thread_ranks;
}

mod cases;
mod values;

// The sources import one another from the root of their crate.
use cuda::{
    allocation_lock, codes, collectives, compile, cubin, device_memory, driver, dylib, kernel_params,
    libraries, nccl, thread_ranks,
};

use cases::{CollectiveCase, build_cases};
use collectives::{
    CollectiveGroup, CollectiveKind, GroupCollective, GroupConfig, GroupFault, GroupTransport, Rendezvous,
};
use compile::{Compiler, KernelCache};
use device_memory::{DeviceMemory, DeviceSlice, copy_to_device, copy_to_host};
use driver::{Context, CudaEvent, CudaResult, CudaStream, cuda_failure};
use libraries::Libraries;
use nccl::{UniqueId, unique_id};
use values::{from_bytes, split_extent, take_range, test_data, to_bytes};

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
    let Some(gpus) = value("--gpus").and_then(|v| v.parse::<usize>().ok()) else {
        println!("skipped: --gpus N tests the collectives of N GPUs");
        return ExitCode::SUCCESS;
    };
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
        let compiler = Compiler::new(nvrtc, "sm_90a".to_string(), Some(kept))?;
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
        let rendezvous = Rendezvous::Nccl(id);
        let compiler = &mut self.compiler;
        let mut group =
            CollectiveGroup::join_members(&self.libraries, compiler, &rendezvous, place, terms, abort)?;
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
                println!("     member {}: {fault:?}; {:?}", seat.member, group.read_progress());
                return Ok(false);
            }
        }
    }
    let ways: [EnqueueFn; 2] = [CollectiveGroup::enqueue_collective, enqueue_with_copy_engines];
    let there =
        ways.into_iter().try_for_each(|issue| check_round_trip(seat, &mut group, &memory, issue, &stream));
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
        transport: None,
    };
    if m.staging_bytes(seat.member) > 256 << 20 {
        return cuda_failure("the case exceeds the staging memory");
    }
    let want = to_bytes(&case.want, case.dtype);
    let poison = vec![0xcd_u8; want.len() + 2 * GUARD_BYTES];
    let operand = to_bytes(&case.operand, case.dtype);
    copy_to_device(memory.slice(operand_at as u64, operand.len())?, &operand)?;
    let guarded = memory.slice((result_at - GUARD_BYTES) as u64, poison.len())?;
    copy_to_device(guarded, &poison)?;
    // SAFETY: operand and result are ranges of `memory` that the case's sizes do not exceed.
    unsafe { group.enqueue_collective(&m, stream) }?;
    wait_until_idle(group, stream, 15)?;
    check_result(case, guarded, &want, "eager")?;
    copy_to_device(guarded, &poison)?;
    stream.begin_capture()?;
    // SAFETY: as for the eager launch.
    let issued = unsafe { group.enqueue_collective(&m, stream) };
    let graph = stream.end_capture()?;
    issued?;
    for _ in 0..20 {
        // SAFETY: as for the eager launch.
        unsafe { stream.launch_graph(&graph) }?;
    }
    wait_until_idle(group, stream, 15)?;
    check_result(case, guarded, &want, "replayed")
}

/// Compares the result, between its guards, with the expected bytes.
fn check_result(
    case: &CollectiveCase,
    guarded: DeviceSlice<'_, u8>,
    want: &[u8],
    how: &str,
) -> CudaResult<()> {
    let mut got = vec![0_u8; want.len() + 2 * GUARD_BYTES];
    copy_to_host(&mut got, guarded)?;
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

/// Function that enqueues a collective.
// SAFETY: a type only; its callers state why the addresses are valid.
type EnqueueFn = unsafe fn(&mut CollectiveGroup, &GroupCollective, &CudaStream) -> CudaResult<()>;

/// Enqueues copies by the DMA copy engines with P2P memory; other collectives are enqueued as
/// usual.
///
/// # Safety
/// As [`CollectiveGroup::enqueue_collective`].
unsafe fn enqueue_with_copy_engines(
    group: &mut CollectiveGroup,
    m: &GroupCollective,
    stream: &CudaStream,
) -> CudaResult<()> {
    if group.active_transport() != GroupTransport::P2p || !matches!(m.kind, CollectiveKind::Copy { .. }) {
        // SAFETY: the caller guarantees it.
        return unsafe { group.enqueue_collective(m, stream) };
    }
    // SAFETY: the caller guarantees it.
    unsafe { group.enqueue_copies(m, stream) }
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
        transport: None,
    };
    let own_rows = memory.slice(places[0], mine.len())?;
    copy_to_device(own_rows, &mine)?;
    for way in [0, 1] {
        // SAFETY: operand and result are different ranges of `memory`, of the shards' sizes.
        unsafe { issue(group, &step(way), stream) }?;
    }
    wait_until_idle(group, stream, 15)?;
    stream.begin_capture()?;
    // SAFETY: as for the eager launches.
    let issued = (0..40).try_for_each(|i| unsafe { issue(group, &step(i % 2), stream) });
    let graph = stream.end_capture()?;
    issued?;
    for _ in 0..20 {
        // SAFETY: as for the eager launches.
        unsafe { stream.launch_graph(&graph) }?;
    }
    wait_until_idle(group, stream, 15)?;
    let mut got = vec![0_u8; mine.len()];
    copy_to_host(&mut got, own_rows)?;
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
                transport: None,
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
    // SAFETY: `measure_speed` places operand and result in different halves of the memory.
    unsafe { issue(group, m, stream) }?;
    wait_until_idle(group, stream, 15)?;
    stream.begin_capture()?;
    // SAFETY: as for the eager launch.
    let issued = (0..OPS).try_for_each(|_| unsafe { issue(group, m, stream) });
    let graph = stream.end_capture()?;
    issued?;
    let events = (0..36)
        .map(|_| Ok((CudaEvent::with_timing()?, CudaEvent::with_timing()?)))
        .collect::<CudaResult<Vec<(CudaEvent, CudaEvent)>>>()?;
    for (begin, end) in &events {
        stream.record_event(begin)?;
        // SAFETY: as for the eager launch.
        unsafe { stream.launch_graph(&graph) }?;
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
    let result_start = memory.slice(2 << 20, 64)?;
    let mut m = GroupCollective {
        kind: CollectiveKind::AllReduce { elements: 100_000, reduction: Reduction::Sum },
        dtype: DType::Bf16,
        operand: memory.device_address(),
        result,
        peer_operand_offsets: vec![0; seat.member_count],
        peer_result_offsets: vec![2 << 20; seat.member_count],
        fingerprint: 0,
        op_index: 0,
        transport: None,
    };
    memory.zero_fill()?;
    for op in 0..3 {
        (m.op_index, m.fingerprint) = (op, 70 + op);
        // SAFETY: operand and result are different ranges of `memory`.
        unsafe { group.enqueue_collective(&m, &stream) }?;
    }
    wait_until_idle(&group, &stream, 10)?;
    group.exchange_table(&[1])?;
    copy_to_device(result_start, &[0xcd_u8; 64])?;
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
    // SAFETY: operand and result are different ranges of `memory`.
    unsafe { group.enqueue_collective(&m, &stream) }?;
    // After a fault, later collectives neither wait nor move data.
    if scenario == "missing-member" {
        let next = GroupCollective { op_index: 346, ..m.clone() };
        // SAFETY: as for the previous collective.
        unsafe { group.enqueue_collective(&next, &stream) }?;
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
    copy_to_host(&mut got, result_start)?;
    let untouched = got == [0xcd; 64];
    let right = match (scenario, &fault) {
        ("delayed-member", None) => !untouched,
        ("missing-member", Some(GroupFault::Timeout { op: 345, peers })) => {
            *peers == [last] && untouched && (900..1600).contains(&took)
        }
        ("mismatch", Some(GroupFault::Mismatch { op, peer, mine, theirs })) => {
            let expected = if me == last { (346, 0, 416, 415) } else { (345, last, 415, 416) };
            (*op, *peer, *mine, *theirs) == expected && untouched && took < 500
        }
        _ => false,
    };
    let fault = fault.map_or("no fault".into(), |f| format!("{f:?}"));
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
        Some(fault) => cuda_failure(format!("{fault:?}")),
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
