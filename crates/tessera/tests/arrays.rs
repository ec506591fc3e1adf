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
use tessera::arrays::{ArrayFunction, ArrayPlan, ArrayRun, DeviceMesh, HostArray};
use tessera_base::Diagnostics;
use tessera_mesh::{Axis, DimShard, DimShards, Mesh};

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

const PROJECT: &str = "program @project streams(compute) {
  %x = input \"x\" : f32[7, 20]
  %w = weight \"w\" : f32[20, 20]
  %y = toperator.matmul %x, %w : f32[7, 20] @compute
  output \"y\", %y @compute
}
";

/// A function whose weight is sharded over tp by heads of four rows, and its weight.
fn project() -> (ArrayFunction, Arrays) {
    let mut function = ArrayFunction::from_text(PROJECT, "project.tir").unwrap();
    let heads = DimShards::from_pairs([(Axis::Tp, DimShard { dim: 0, unit: 4 })]);
    function.sources.insert("w".to_string(), heads.clone());
    function.outputs[0].shards = Some(DimShards::from_pairs([(Axis::Tp, DimShard { dim: 1, unit: 4 })]));
    let mesh: Mesh = "tp=5".parse().unwrap();
    let devices = (0..5).map(|i| format!("cpu{i}")).collect();
    function.mesh = Some(DeviceMesh { axes: vec![Axis::Tp, Axis::Ep], mesh, devices });
    let weight = HostArray::from_vec(vec![20, 20], (0..400).map(|i| (i % 7) as f32).collect());
    (function, Arrays::from([("w".to_string(), weight)]))
}

#[test]
fn a_function_survives_its_folder_and_moves_to_another_mesh() {
    let (function, weights) = project();
    let dir = tempfile::tempdir().unwrap();
    function.write(&dir.path().join("f"), &weights).unwrap();
    let (read, found) = ArrayFunction::read(&dir.path().join("f")).unwrap();
    assert_eq!((read.program.as_ref(), &found), (function.program.as_ref(), &weights));
    assert_eq!(
        (&read.sources, &read.outputs, &read.mesh),
        (&function.sources, &function.outputs, &function.mesh)
    );
    assert_eq!((read.returns_one, read.dtype), (function.returns_one, function.dtype));
    // Even on five ranks, uneven on two, and on neither is a head divided.
    for (text, local) in [("tp=5", 4), ("tp=2", 12), ("tp=1, ep=3", 20)] {
        let mesh: Mesh = text.parse().unwrap();
        let laid_out = read.lay_out(&mesh).unwrap();
        let layout = laid_out.sources["w"];
        assert_eq!(layout.local_shape(&[20, 20], &mesh, Default::default()), [local, 20], "{text}");
    }
    let refused = read.lay_out(&"tp=6".parse().unwrap()).unwrap_err();
    assert_eq!(ids(&refused), ["T0107", "T0107"], "one for the weight and one for the output");
    let fixed = ArrayFunction { fixed_axes: [Axis::Tp].into(), ..read };
    assert_eq!(ids(&fixed.lay_out(&"tp=2".parse().unwrap()).unwrap_err()), ["T0097"]);
    fixed.lay_out(&"tp=5, ep=2".parse().unwrap()).unwrap();
}

#[test]
fn a_damaged_folder_of_a_function_is_refused_with_every_problem() {
    let (function, weights) = project();
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("f");
    function.write(&folder, &weights).unwrap();
    let file = folder.join("function.json");
    let text = std::fs::read_to_string(&file).unwrap();
    // A weight that does not exist, and a precision that does not.
    std::fs::write(&file, text.replace("\"w\"", "\"v\"").replace("\"f32\"", "\"f31\"")).unwrap();
    let found = ArrayFunction::read(&folder).unwrap_err();
    assert_eq!(ids(&found), ["T0096", "T0096"]);
    assert!(found.iter().all(|d| d.labels.iter().any(|label| label.location.ends_with("function.json"))));
    std::fs::write(&file, &text).unwrap();
    let program = folder.join("program.tir");
    let text = std::fs::read_to_string(&program).unwrap();
    std::fs::write(&program, text.replace("%w : f32[7, 20]", "%u : f32[7, 20]")).unwrap();
    let found = ArrayFunction::read(&folder).unwrap_err();
    assert!(found[0].code.id.starts_with("T02"), "{found:#?}");
    assert!(found[0].labels.iter().any(|l| l.location.ends_with("program.tir") && l.span.is_some()));
    let plan = seal_text(&CASES[0].to_text()).unwrap();
    let role = tessera_ir::print(plan.sealed.rank_program("array.linear", tessera_mesh::Rank(0)).unwrap());
    assert_eq!(ids(&ArrayFunction::from_text(&role, "role").unwrap_err()), ["T0096"]);
}

#[test]
fn a_sealed_plan_is_proved_again_in_memory() {
    let plan = seal_text(&CASES[1].to_text()).unwrap();
    let proved = plan.verify_again().unwrap();
    assert!(proved.iter().any(|p| p.name == "complete" && p.statement.contains("each of 6 ranks")));
}
