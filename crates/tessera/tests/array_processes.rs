//! Array programs on ranks that are processes: this test executable starts itself again as each rank.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]
#![allow(clippy::print_stdout, reason = "the test prints what it did not check")]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the test starts itself again and reads /proc"
)]

#[path = "support/array_cases.rs"]
mod array_cases;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use array_cases::{
    CASES, Extents, MATMUL_TEXT, OVERLAP_TEXT, assert_close, assert_overlap_trace, matmul_arrays,
    overlap_ids, overlap_inputs, seal_text,
};
use rustix::process::{Pid, Signal, kill_process};
use tessera::arrays::{ArrayPlan, ArrayProcessOptions, ArrayRun, RunDevice};
use tessera_base::Diagnostics;
use tessera_harness::{run, tests};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).map(String::as_str) == Some("as-rank") {
        return u8::try_from(tessera::rank_main(|| {})).unwrap_or(1).into();
    }
    run(&tests![
        processes_and_threads_return_equal_bits
        a_traced_run_shows_each_op_and_what_overlapped
        a_refused_call_leaves_the_run_usable
        a_killed_rank_ends_the_call_and_every_process
        an_interrupt_ends_a_call_and_every_process
        a_stop_ends_the_run_between_two_calls
        a_dropped_run_leaves_no_process
        the_failure_of_a_rank_has_its_code
        weights_that_are_not_finite_are_refused_by_the_ranks
        what_is_wrong_before_the_start_starts_nothing
        gpus_that_are_missing_are_named
    ])
}

/// A run, and the folder that holds its run directory.
struct Started {
    run: ArrayRun,
    dir: tempfile::TempDir,
}

fn options(dir: &Path) -> ArrayProcessOptions {
    let me = std::env::current_exe().unwrap().to_string_lossy().into_owned();
    ArrayProcessOptions {
        oversubscribe: true,
        threads: Some(1),
        ..ArrayProcessOptions::new(vec![me, "as-rank".into()], dir.join("run"))
    }
}

fn seal_case(case: Extents) -> Arc<ArrayPlan> {
    seal_text(&case.to_text()).unwrap_or_else(|ds| panic!("{ds:#?}"))
}

fn start(case: Extents) -> Started {
    let dir = tempfile::tempdir().unwrap();
    let run = ArrayRun::start_processes(&seal_case(case), case.weights(), options(dir.path()));
    Started { run: run.unwrap_or_else(|ds| panic!("{ds:#?}")), dir }
}

fn ids(ds: &Diagnostics) -> Vec<&str> {
    ds.iter().map(|d| d.code.id).collect()
}

fn assert_gone(pids: &[u32]) {
    for pid in pids {
        assert!(!PathBuf::from(format!("/proc/{pid}")).exists(), "process {pid} is left");
    }
}

/// Calls a program until the run ends.
fn call_until_the_end(run: &mut ArrayRun, case: Extents) -> Diagnostics {
    let inputs = case.inputs("linear", 0);
    loop {
        if let Err(ds) = run.call("linear", &inputs) {
            return ds;
        }
    }
}

fn processes_and_threads_return_equal_bits() {
    for case in CASES {
        let Started { run: mut processes, dir } = start(case);
        let mut threads = ArrayRun::start_threads(&seal_case(case), case.weights(), 1).unwrap();
        for (seed, program) in [(0, "linear"), (1, "linear"), (2, "gather"), (3, "linear")] {
            let inputs = case.inputs(program, seed);
            let outputs = processes.call(program, &inputs).unwrap();
            assert_eq!(outputs, threads.call(program, &inputs).unwrap());
            assert_close(&outputs, &case.expected(program, &inputs));
        }
        let (out, pids) = (dir.path().join("run"), processes.process_ids().to_vec());
        assert_eq!(pids.len() as u64, case.mesh[0] * case.mesh[1]);
        assert!(!out.join("weights.safetensors").exists(), "every rank has loaded the weights");
        processes.close().unwrap();
        assert_gone(&pids);
        let record = std::fs::read_to_string(out.join("record.jsonl")).unwrap();
        let end = record.lines().last().unwrap();
        assert!(end.contains(r#""kind":"end","status":"complete""#), "{end}");
        assert!(tessera::opened_run::open_run_dir(&out).unwrap().record.start.model == "arrays");
    }
}

fn a_traced_run_shows_each_op_and_what_overlapped() {
    let dir = tempfile::tempdir().unwrap();
    let plan = seal_text(OVERLAP_TEXT).unwrap();
    let traced = ArrayProcessOptions { trace: Some(overlap_ids()), ..options(dir.path()) };
    let mut run = ArrayRun::start_processes(&plan, Default::default(), traced).unwrap();
    let outputs = [0, 1].map(|_| run.call("overlap", &overlap_inputs()).unwrap());
    assert_eq!(outputs[0], outputs[1]);
    let log = run.log();
    run.close().unwrap();
    let trace = log.trace().unwrap();
    assert_overlap_trace(&trace, 2);
    let file = std::fs::read_to_string(dir.path().join("run/trace.json")).unwrap();
    assert_eq!(file, trace.to_perfetto());
    let on_gpus = ArrayProcessOptions {
        trace: Some(overlap_ids()),
        device: RunDevice::Cuda,
        ..options(&dir.path().join("other"))
    };
    assert!(ArrayRun::start_processes(&plan, Default::default(), on_gpus).is_err());
}

fn a_refused_call_leaves_the_run_usable() {
    let case = CASES[0];
    let Started { mut run, dir: _dir } = start(case);
    let ds = run.call("gather", &case.inputs("linear", 0)).unwrap_err();
    assert_eq!(ids(&ds), ["T0091"]);
    let inputs = case.inputs("gather", 0);
    assert_close(&run.call("gather", &inputs).unwrap(), &case.expected("gather", &inputs));
    run.close().unwrap();
}

fn a_killed_rank_ends_the_call_and_every_process() {
    let case = CASES[1];
    for rank in [0, 4] {
        let Started { mut run, dir: _dir } = start(case);
        let pids = run.process_ids().to_vec();
        run.call("linear", &case.inputs("linear", 0)).unwrap();
        let victim = Pid::from_raw(pids[rank].cast_signed()).unwrap();
        kill_process(victim, Signal::KILL).unwrap();
        let ended = call_until_the_end(&mut run, case);
        assert_eq!(ids(&ended), ["T0742"], "{ended:?}");
        assert!(ended[0].message.contains(&format!("rank {rank}")), "{ended:?}");
        assert_gone(&pids);
        assert_eq!(ids(&call_until_the_end(&mut run, case)), ["T0092"]);
    }
}

fn an_interrupt_ends_a_call_and_every_process() {
    let case = CASES[0];
    let Started { mut run, dir: _dir } = start(case);
    let (pids, handle) = (run.process_ids().to_vec(), run.interrupt_handle());
    run.call("linear", &case.inputs("linear", 0)).unwrap();
    let other = std::thread::spawn(move || handle.interrupt());
    let ended = call_until_the_end(&mut run, case);
    other.join().unwrap();
    assert_eq!(ids(&ended), ["T0092"]);
    assert!(ended[0].message.contains("interrupted"), "{ended:?}");
    assert_gone(&pids);
}

fn a_stop_ends_the_run_between_two_calls() {
    let case = CASES[0];
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path());
    let stop = options.stop.clone();
    let mut run = ArrayRun::start_processes(&seal_case(case), case.weights(), options).unwrap();
    let pids = run.process_ids().to_vec();
    stop.request_stop();
    let ended = call_until_the_end(&mut run, case);
    assert_eq!(ids(&ended), ["T0092"]);
    assert_gone(&pids);
}

fn a_dropped_run_leaves_no_process() {
    let Started { run, dir: _dir } = start(CASES[0]);
    let pids = run.process_ids().to_vec();
    drop(run);
    assert_gone(&pids);
}

fn the_failure_of_a_rank_has_its_code() {
    let dir = tempfile::tempdir().unwrap();
    let plan = seal_text(MATMUL_TEXT).unwrap();
    let [weights, large] = matmul_arrays(1e30, 1e30);
    let mut run = ArrayRun::start_processes(&plan, weights, options(dir.path())).unwrap();
    let pids = run.process_ids().to_vec();
    assert_eq!(ids(&run.call("matmul", &large).unwrap_err()), ["T0771"]);
    assert_gone(&pids);
}

fn weights_that_are_not_finite_are_refused_by_the_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let [weights, _] = matmul_arrays(f32::NAN, 1.0);
    let plan = seal_text(MATMUL_TEXT).unwrap();
    let ds = ArrayRun::start_processes(&plan, weights, options(dir.path())).unwrap_err();
    assert_eq!(ids(&ds), ["T0770"], "{ds:?}");
    assert!(!dir.path().join("run/weights.safetensors").exists());
}

fn what_is_wrong_before_the_start_starts_nothing() {
    let plan = seal_text(MATMUL_TEXT).unwrap();
    let [weights, _] = matmul_arrays(1.0, 1.0);
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("run")).unwrap();
    std::fs::write(dir.path().join("run/file"), "").unwrap();
    let ds = ArrayRun::start_processes(&plan, weights.clone(), options(dir.path())).unwrap_err();
    assert_eq!(ids(&ds), ["T0013"], "{ds:?}");
    let wide = MATMUL_TEXT.replace(
        "f32[2, 3]\n  %w = weight \"w\" : f32[2, 3]",
        "f32[99999, 999]\n  %w = weight \"w\" : f32[2, 999]",
    );
    let wide = seal_text(&wide).unwrap();
    let [mut large, _] = matmul_arrays(1.0, 1.0);
    large.insert("w".to_string(), array_cases::numbers(0, &[4, 999]));
    let elsewhere = tempfile::tempdir().unwrap();
    let ds = ArrayRun::start_processes(&wide, large, options(elsewhere.path())).unwrap_err();
    assert_eq!(ids(&ds), ["T0090"], "{ds:?}");
    assert!(!elsewhere.path().join("run").exists());
}

fn gpus_that_are_missing_are_named() {
    let found = tessera::gpus::GpuDiscovery::discover();
    if found.devices.is_ok_and(|devices| !devices.gpus.is_empty()) {
        println!("not run: this host has GPUs");
        return;
    }
    let plan = seal_text(MATMUL_TEXT).unwrap();
    let [weights, _] = matmul_arrays(1.0, 1.0);
    let dir = tempfile::tempdir().unwrap();
    let options = ArrayProcessOptions { device: RunDevice::Cuda, ..options(dir.path()) };
    let ds = ArrayRun::start_processes(&plan, weights, options).unwrap_err();
    assert!(ds[0].code.id.starts_with("T13"), "{ds:?}");
    assert!(!dir.path().join("run").exists());
}
