//! Array programs on ranks that are threads: shards of inputs, weights and outputs, refusals, and ends of runs.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

#[path = "support/array_cases.rs"]
mod array_cases;

use std::collections::BTreeMap;
use std::sync::Arc;

use array_cases::{
    Arrays, CASES, Extents, MATMUL_TEXT, OVERLAP_TEXT, assert_close, assert_overlap_trace, bundle, mapping,
    matmul_arrays, numbers, overlap_ids, overlap_inputs, seal_text,
};
use tessera::arrays::{ArrayPlan, ArrayRun, HostArray};
use tessera_base::Diagnostics;

fn start(case: Extents) -> ArrayRun {
    let plan = seal_text(&case.to_text()).unwrap_or_else(|ds| panic!("{ds:#?}"));
    ArrayRun::start_threads(&plan, case.weights(), 1).unwrap()
}

fn ids(ds: &Diagnostics) -> Vec<&str> {
    ds.iter().map(|d| d.code.id).collect()
}

#[test]
fn ranks_compute_their_shards_of_whole_arrays() {
    for case in CASES {
        let mut run = start(case);
        for (seed, program) in [(0, "linear"), (1, "linear"), (2, "gather"), (3, "linear")] {
            let inputs = case.inputs(program, seed);
            let outputs = run.call(program, &inputs).unwrap();
            assert_close(&outputs, &case.expected(program, &inputs));
        }
        run.close().unwrap();
    }
}

/// The ranks of tp hold equal outputs, so that their group is compared and one of them returns its shard.
#[test]
fn ranks_with_equal_shards_return_one() {
    let case = CASES[1];
    let plan = seal_text(&case.text_of(&["linear"])).unwrap();
    let mut run = ArrayRun::start_threads(&plan, case.weights(), 2).unwrap();
    let inputs = case.inputs("linear", 0);
    let outputs = run.call("linear", &inputs).unwrap();
    assert_close(&outputs, &case.expected("linear", &inputs));
    assert_eq!(outputs, start(case).call("linear", &inputs).unwrap());
}

/// A caller may keep a run on another thread than the one that started it.
#[test]
fn a_run_moves_between_threads() {
    let case = CASES[0];
    let mut run = start(case);
    let inputs = case.inputs("gather", 0);
    let there = inputs.clone();
    let outputs = std::thread::spawn(move || run.call("gather", &there).unwrap()).join().unwrap();
    assert_close(&outputs, &case.expected("gather", &inputs));
}

#[test]
fn a_plan_states_its_programs_and_survives_its_folder() {
    let case = CASES[1];
    let plan = seal_text(&case.to_text()).unwrap();
    assert!(plan.program_names().eq(["gather", "linear"]));
    let linear = plan.program("linear").unwrap();
    assert_eq!(linear.inputs[0].shape, [case.rows, case.columns]);
    assert_eq!(linear.outputs[0].shape, [case.rows, case.results]);
    assert!(plan.weights().eq([("b", &[case.results][..]), ("w", &[case.results, case.columns])]));
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("plan");
    plan.write(&folder).unwrap();
    let read = ArrayPlan::read(&folder).unwrap();
    assert_eq!(read.sealed.digest_hex(), plan.sealed.digest_hex());
    assert!(read.program_names().eq(plan.program_names()));
    let inputs = case.inputs("linear", 5);
    let [a, b] = [plan, Arc::new(read)].map(|plan| {
        ArrayRun::start_threads(&plan, case.weights(), 1).unwrap().call("linear", &inputs).unwrap()
    });
    assert_eq!(a, b);
    // A changed program is another plan.
    let file = std::fs::read_dir(folder.join("programs")).unwrap().map(|f| f.unwrap().path());
    let file = file.filter(|f| f.to_string_lossy().contains("linear")).min().unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("silu", "gelu_tanh")).unwrap();
    assert!(!ArrayPlan::read(&folder).unwrap_err().is_empty());
}

#[test]
fn wrong_inputs_are_refused_and_the_run_goes_on() {
    let case = CASES[0];
    let mut run = start(case);
    let right = case.inputs("linear", 0);
    let refused = |run: &mut ArrayRun, program: &str, inputs: &Arrays| run.call(program, inputs).unwrap_err();
    let ds = refused(&mut run, "liner", &right);
    assert_eq!((ids(&ds), ds[0].hint.as_deref()), (vec!["T0091"], Some("did you mean `linear`?")));
    let ds = refused(&mut run, "linear", &BTreeMap::new());
    assert_eq!(ds[0].message, "the input `x` of `linear` is missing");
    let wrong = BTreeMap::from([
        ("x".to_string(), numbers(0, &[case.rows, case.columns + 1])),
        ("z".to_string(), numbers(0, &[1])),
    ]);
    let ds = refused(&mut run, "linear", &wrong);
    assert_eq!(ids(&ds), ["T0091", "T0091"]);
    assert!(
        ds[0].message.contains("another shape") && ds[0].labels[0].message.contains("f32[3, 6]"),
        "{ds:?}"
    );
    assert!(ds[1].message.contains("no input `z`"), "{ds:?}");
    let outputs = run.call("linear", &right).unwrap();
    assert_close(&outputs, &case.expected("linear", &right));
}

#[test]
fn wrong_weights_start_nothing() {
    let case = CASES[0];
    let plan = seal_text(&case.to_text()).unwrap();
    let mut weights = case.weights();
    let w = weights.remove("w").unwrap();
    weights.insert("v".to_string(), w);
    let ds = ArrayRun::start_threads(&plan, weights, 1).unwrap_err();
    assert_eq!(ids(&ds), ["T0091", "T0091"]);
    let plan = seal_text(MATMUL_TEXT).unwrap();
    let [infinite, _] = matmul_arrays(f32::INFINITY, 1.0);
    let ds = ArrayRun::start_threads(&plan, infinite, 1).unwrap_err();
    assert_eq!(ids(&ds), ["T0770"], "{ds:?}");
}

#[test]
fn programs_that_are_not_of_arrays_alone_are_refused() {
    let program = |body: &str| format!("program @f role(r) mesh(tp=2) {{\n{body}\n}}\n");
    let cases = [
        (
            "  %x = input : f32[2, 2]\n  %s = call : f32\n  %y = ttile.to_x0 %x, %x, sigma=%s\n  output \"y\", %y",
            "scalar",
        ),
        (
            "  buffer @kept : f32[2, 2]\n  %x = input : f32[2, 2]\n  cache.write @kept, %x\n  output \"y\", %x",
            "buffer",
        ),
        ("  %w = weight \"w\" {load = \"patch\"} : f32[2, 2]\n  output \"y\", %w", "transformation `patch`"),
        ("  %x = input : f32[2]", "returns nothing"),
    ];
    for (body, why) in cases {
        let ds = seal_text(&program(body)).unwrap_err();
        assert!(ds.iter().any(|d| d.code.id == "T0090" && d.message.contains(why)), "{why}: {ds:#?}");
    }
    let mut unlike = bundle(MATMUL_TEXT);
    unlike.calls[0].1.push("matmul".to_string());
    let mapping_of_programs = mapping(&unlike.mesh);
    assert_eq!(ids(&ArrayPlan::new(unlike, &mapping_of_programs).unwrap_err()), ["T0090"]);
    let other = mapping(&"tp=3".parse().unwrap());
    assert_eq!(ids(&ArrayPlan::new(bundle(MATMUL_TEXT), &other).unwrap_err()), ["T0090"]);
}

#[test]
fn a_failed_rank_ends_the_run_with_its_code() {
    let plan = seal_text(MATMUL_TEXT).unwrap();
    let [weights, large] = matmul_arrays(1e30, 1e30);
    let [_, small] = matmul_arrays(1.0, 2.0);
    let mut run = ArrayRun::start_threads(&plan, weights, 1).unwrap();
    let outputs = run.call("matmul", &small).unwrap();
    assert_eq!(outputs["y"], HostArray::from_vec(vec![2, 4], vec![3.0 * 2.0 * 1e30; 8]));
    assert_eq!(ids(&run.call("matmul", &large).unwrap_err()), ["T0771"]);
    let later = run.call("matmul", &small).unwrap_err();
    assert_eq!(ids(&later), ["T0092"]);
    assert!(later[0].notes[0].contains("T0771"), "{later:?}");
}

#[test]
fn an_interrupt_ends_a_call() {
    let case = CASES[1];
    let mut run = start(case);
    let inputs = case.inputs("linear", 0);
    run.call("linear", &inputs).unwrap();
    let handle = run.interrupt_handle();
    let other = std::thread::spawn(move || handle.interrupt());
    // The interrupt comes between two calls or during one.
    let ended = loop {
        if let Err(ds) = run.call("linear", &inputs) {
            break ds;
        }
    };
    other.join().unwrap();
    assert_eq!(ids(&ended), ["T0092"]);
    assert!(ended[0].message.contains("interrupted"), "{ended:?}");
}

#[test]
fn a_traced_run_shows_each_op_and_what_overlapped() {
    let plan = seal_text(OVERLAP_TEXT).unwrap();
    let mut run = ArrayRun::start_traced_threads(&plan, BTreeMap::new(), 1, overlap_ids()).unwrap();
    let inputs = overlap_inputs();
    let first = run.call("overlap", &inputs).unwrap();
    run.call("overlap", &BTreeMap::new()).unwrap_err();
    assert_eq!(run.call("overlap", &inputs).unwrap(), first);
    let log = run.log();
    run.close().unwrap();
    let trace = log.trace().unwrap();
    assert_overlap_trace(&trace, 2);
    let perfetto: serde_json::Value = serde_json::from_str(&trace.to_perfetto()).unwrap();
    let events = perfetto["traceEvents"].as_array().unwrap();
    let threads: Vec<_> = events.iter().filter(|e| e["name"] == "thread_name" && e["pid"] == 2).collect();
    let named: Vec<_> = threads.iter().map(|e| (e["tid"].as_u64(), e["args"]["name"].as_str())).collect();
    assert_eq!(
        named,
        [
            (Some(0), Some("compute (stream 0)")),
            (Some(7), Some("tp_collective (stream 7)")),
            (Some(2), Some("a2a (stream 2)"))
        ]
    );
}

#[test]
fn a_run_that_is_not_traced_has_a_record_alone() {
    let case = CASES[0];
    let mut run = start(case);
    for program in ["linear", "gather", "linear"] {
        run.call(program, &case.inputs(program, 0)).unwrap();
    }
    let record = run.log().record();
    assert_eq!(run.log().trace(), None);
    let calls: Vec<_> = record.calls.iter().map(|call| (call.number, call.program.as_str())).collect();
    assert_eq!(calls, [(1, "linear"), (2, "gather"), (3, "linear")]);
    assert!(record.calls.windows(2).all(|pair| pair[0].end_ns <= pair[1].start_ns));
    assert_eq!(record.plan, seal_text(&case.to_text()).unwrap().sealed.digest_hex());
}
