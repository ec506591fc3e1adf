//! Compile traces that were written by hand, for what the recorded ones lack.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::fmt::Write;

use tessera_base::Diagnostic;
use tessera_torch::codes::{T1410, T1411};
use tessera_torch::trace::{Budget, CompileReport, RunLogs, compare_ranks, examine_activity, read_log};

const SUM: &str = "_c10d_functional.all_reduce.default(x, 'sum', '0')";
const MAX: &str = "_c10d_functional.all_reduce.default(x, 'max', '0')";
const GATHER: &str = "_c10d_functional.all_gather_into_tensor.default(x, 4, '0')";
const PAIR: &str = "_c10d_functional.all_reduce.default(x, 'sum', 'pair')";

/// The log of a rank, as text.
#[derive(Default, Clone)]
struct Log {
    text: String,
    seconds: u32,
}

impl Log {
    fn record(mut self, header: &str, context: &str, payload: &str) -> Log {
        let (minutes, seconds) = (self.seconds / 60, self.seconds % 60);
        let comma = if context.is_empty() { "" } else { ", " };
        writeln!(self.text, "V1123 22:{minutes:02}:{seconds:02}.5 9 a.py:1] {{{header}{comma}{context}}}")
            .unwrap();
        payload.lines().for_each(|l| writeln!(self.text, "\t{l}").unwrap());
        self
    }

    fn start(self, frame: u32, compile: u32) -> Log {
        let stack = r#""dynamo_start": {"stack": [{"line": 3, "name": "step", "filename": "/u/m.py"}]}"#;
        self.record(stack, &context(frame, compile), "")
    }

    fn graph(self, (frame, compile): (u32, u32), head: &str, calls: &[&str]) -> Log {
        let mut graph = format!("def forward(self, x: \"{head}\"):\n");
        calls.iter().for_each(|c| writeln!(graph, "    y = torch.ops.{c};").unwrap());
        let artifact = r#""artifact": {"name": "inductor_post_grad_graph", "encoding": "string"}"#;
        self.record(artifact, &context(frame, compile), &graph)
    }

    fn end(self, frame: u32, compile: u32) -> Log {
        let metrics = format!(
            "\"compilation_metrics\": {{\"compile_id\": \"{frame}/{compile}\", \"graph_op_count\": 2}}"
        );
        self.record(&metrics, &context(frame, compile), "")
    }

    /// A whole compile of `f32[8]` operands.
    fn compile(self, frame: u32, compile: u32, calls: &[&str]) -> Log {
        self.compile_of("f32[8][1]cuda:0", frame, compile, calls)
    }

    fn compile_of(self, head: &str, frame: u32, compile: u32, calls: &[&str]) -> Log {
        self.start(frame, compile).graph((frame, compile), head, calls).end(frame, compile)
    }

    fn backward(self, frame: u32, calls: &[&str]) -> Log {
        self.graph((frame, 0), "f32[8][1]cuda:0\", tangents_1: \"f32[8][1]cuda:0", calls)
    }

    fn broken(self, frame: u32, line: u32) -> Log {
        let text =
            format!("Graph break in user code at /u/m.py:{line}\nGraph Break Reason: Call to `print`\n");
        let artifact = r#""artifact": {"name": "dynamo_graph_break_reason", "encoding": "string"}"#;
        self.record(artifact, &context(frame, 0), &text)
    }
}

fn context(frame: u32, compile: u32) -> String {
    format!("\"frame_id\": {frame}, \"frame_compile_id\": {compile}, \"attempt\": 0")
}

fn read(logs: &[Log]) -> RunLogs {
    read_of(logs, None).unwrap()
}

fn read_of(logs: &[Log], ranks: Option<u32>) -> Result<RunLogs, Diagnostic> {
    let logs = logs
        .iter()
        .enumerate()
        .map(|(rank, log)| read_log(&format!("log {rank}"), Some(rank as u32), log.text.as_bytes()).unwrap());
    RunLogs::from_logs(logs.collect(), ranks)
}

/// Returns the codes and messages of a comparison.
fn compare(logs: &[Log]) -> Vec<(&'static str, String)> {
    compare_ranks(&read(logs)).diagnostics.into_iter().map(|d| (d.code.id, d.message)).collect()
}

fn examine(logs: &[Log]) -> CompileReport {
    examine_activity(&read(logs), &Budget::from_toml("b.toml", "").unwrap())
}

fn failing(report: &CompileReport) -> Vec<&'static str> {
    report.budget.iter().filter(|l| !l.passes()).map(|l| l.key).collect()
}

fn log() -> Log {
    Log::default()
}

#[test]
fn frames_that_a_break_split_compare_equal_in_both_directions() {
    let whole = log().compile(0, 0, &[SUM, MAX]).backward(0, &[MAX, GATHER, SUM]);
    let split = log().compile(0, 0, &[SUM]).backward(0, &[SUM]).broken(0, 7).compile(1, 0, &[MAX]);
    let split = split.backward(1, &[MAX, GATHER]);
    let all = [whole.clone(), split.clone(), whole.clone(), split];
    assert_eq!(compare(&all), []);
    // The same backwards the other way round are another sequence.
    let wrong = log().compile(0, 0, &[SUM, MAX]).backward(0, &[SUM, GATHER, MAX]);
    let found = compare(&[whole.clone(), wrong, whole.clone(), whole]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].0, "T1413");
    assert!(
        found[0].1.contains("rank 1 compiled another sequence") && found[0].1.contains("in the backward")
    );
}

#[test]
fn two_groups_in_opposite_orders_are_reported_and_in_one_order_are_not() {
    let (a, b) = (log().compile(0, 0, &[SUM, PAIR]), log().compile(0, 0, &[PAIR, SUM]));
    let found = compare(&[a.clone(), b]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].0, "T1415");
    assert_eq!(compare(&[a.clone(), a]), []);
    // Three ranks, each pair with a group, and no two of them share two groups.
    let in_order = |groups: [&str; 2]| {
        let calls = groups.map(|g| format!("_c10d_functional.all_gather_into_tensor.default(x, 2, '{g}')"));
        log().compile(0, 0, &[&calls[0], &calls[1]])
    };
    let all = [in_order(["01", "02"]), in_order(["12", "01"]), in_order(["02", "12"])];
    let found = compare(&all);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].0 == "T1415" && found[0].1.starts_with("ranks 0, 1, 2 "), "{found:?}");
    let [first, second, _] = all;
    assert_eq!(compare(&[first, second, in_order(["12", "02"])]), []);
}

#[test]
fn the_minority_departs_and_the_first_position_is_named() {
    let usual = log().compile(0, 0, &[SUM, SUM, MAX]);
    let odd = log().compile(0, 0, &[SUM, GATHER, MAX]);
    let found = compare(&[usual.clone(), usual.clone(), odd, usual]);
    assert_eq!(found.len(), 1, "{found:?}");
    let text = "rank 2 compiled another sequence of collectives than most: another op at number 2 of group 0";
    assert_eq!(found[0], ("T1413", text.to_string()));
}

#[test]
fn a_missing_rank_is_named_from_group_sizes_numbers_or_the_option() {
    let four = log().compile(0, 0, &[GATHER]);
    let found = compare(&[four.clone(), four.clone()]);
    assert_eq!(found, [("T1412", "there is no log of ranks 2, 3".to_string())]);
    let one = log().compile(0, 0, &[SUM]);
    assert_eq!(compare(&[one.clone(), one.clone()]), []);
    let run = read_of(&[one.clone(), one.clone()], Some(3)).unwrap();
    assert_eq!(run.missing_ranks(), [2]);
    assert_eq!(failing(&examine_activity(&run, &Budget::from_toml("", "").unwrap())), ["missing_ranks"]);
    assert_eq!(read_of(&[one.clone(), one.clone()], Some(1)).unwrap_err().code, &T1411);
    let read = |rank| read_log("log", Some(rank), one.text.as_bytes()).unwrap();
    let gap = RunLogs::from_logs(vec![read(0), read(2)], None).unwrap();
    assert_eq!(gap.missing_ranks(), [1]);
    let twice = RunLogs::from_logs(vec![read(1), read(1)], None);
    assert_eq!(twice.unwrap_err().code, &T1411);
}

#[test]
fn a_log_that_ends_within_a_compile_is_a_doubt_and_a_finished_one_is_a_difference() {
    let whole = log().compile(0, 0, &[SUM]).compile(1, 0, &[MAX]);
    let ended = log().compile(0, 0, &[SUM]);
    let found = compare(&[whole.clone(), ended.clone()]);
    assert_eq!(found[0].0, "T1414");
    let open = ended.clone().start(1, 0);
    let run = compare_ranks(&read(&[whole.clone(), open]));
    assert!(run.diagnostics.iter().all(|d| !d.is_error()) && run.diagnostics[0].code.id == "T1417");
    let mut cut = whole.clone();
    cut.text.truncate(ended.text.len() + 20);
    let run = read(&[whole.clone(), cut]);
    assert!(run.notes[0].contains("rank 1 is cut off"));
    assert!(compare_ranks(&run).diagnostics.iter().all(|d| !d.is_error()));
    // What an open log does hold is still compared.
    let wrong = log().compile(0, 0, &[MAX, MAX]).start(1, 0);
    assert_eq!(compare(&[whole, wrong])[0].0, "T1413");
}

#[test]
fn a_collective_at_a_break_of_one_rank_may_have_run_eagerly() {
    let whole = log().compile(0, 0, &[SUM, MAX, SUM]);
    let split = log().compile(0, 0, &[SUM]).broken(0, 7).compile(1, 0, &[SUM]);
    let found = compare_ranks(&read(&[whole.clone(), split])).diagnostics;
    assert!(found.len() == 1 && found[0].code.id == "T1417" && !found[0].is_error(), "{found:?}");
    let other = log().compile(0, 0, &[SUM]).broken(0, 7).compile(1, 0, &[GATHER]);
    assert!(compare(&[whole.clone(), other]).iter().any(|(code, _)| *code == "T1413"));
    let no_break = log().compile(0, 0, &[SUM]).compile(1, 0, &[SUM]);
    assert_eq!(compare(&[whole, no_break])[0].0, "T1414");
}

#[test]
fn a_recompile_counts_if_it_brings_another_collective() {
    let once = log().compile(0, 0, &[SUM]);
    let same = once.clone().compile(0, 1, &[SUM]);
    assert_eq!(compare(&[once.clone(), same.clone()]), []);
    let dynamic = once.clone().compile_of("f32[s0][1]cuda:0", 0, 1, &[SUM]);
    assert_eq!(compare(&[once.clone(), dynamic]), []);
    let longer = once.clone().compile_of("f32[12][1]cuda:0", 0, 1, &[SUM]);
    let found = compare(&[once.clone(), longer.clone()]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].0, "T1416");
    assert_eq!(compare(&[longer.clone(), longer]), []);
}

#[test]
fn the_same_number_of_elements_in_another_shape_is_the_same_collective() {
    let (a, b) = (log().compile_of("f32[4, 6][6, 1]cuda:0", 0, 0, &[SUM]), "f32[24][1]cuda:0");
    assert_eq!(compare(&[a.clone(), log().compile_of(b, 0, 0, &[SUM])]), []);
    let odd = log().compile_of("f32[25][1]cuda:0", 0, 0, &[SUM]);
    assert!(compare(&[a, odd])[0].1.contains("another number of elements"));
}

#[test]
fn a_group_of_some_ranks_is_complete_if_its_size_says_so() {
    let pair = "_c10d_functional.all_gather_into_tensor.default(x, 2, 'left')";
    let (in_pair, alone) = (log().compile(0, 0, &[SUM, pair]), log().compile(0, 0, &[SUM]));
    assert_eq!(compare(&[in_pair.clone(), alone.clone(), in_pair.clone(), alone.clone()]), []);
    let found = compare(&[in_pair.clone(), alone.clone(), alone.clone()]);
    assert_eq!(found[0].0, "T1414");
    // PyTorch may give disjoint groups one name.
    let other = log().compile(0, 0, &[SUM, pair, pair]);
    let all = [in_pair.clone(), in_pair, other.clone(), other];
    assert_eq!(compare(&all), []);
    assert_eq!(compare(&all[..3])[0].0, "T1414");
    // Without a size in the log, sides of two ranks or more may be groups of their own.
    let (sum, twice) = (log().compile(0, 0, &[PAIR]), log().compile(0, 0, &[PAIR, PAIR]));
    let found = compare(&[sum.clone(), sum.clone(), twice.clone(), twice.clone()]);
    assert_eq!(found.iter().map(|f| f.0).collect::<Vec<_>>(), ["T1417"]);
    assert_eq!(compare(&[sum.clone(), sum, twice])[0].0, "T1414");
}

#[test]
fn the_older_names_of_records_are_read_and_unknown_ops_are_counted() {
    let graph = "def forward(self, x: \"f32[8][1]cuda:0\"):\n  y = torch.ops._c10d_functional.all_reduce.default(x, 'sum', '0')\n";
    let odd = "  z = torch.ops.symm_mem.one_shot_all_reduce.default(x, 'sum', '0')\n";
    let id = "\"compiled_autograd_id\": 1, \"frame_id\": null, \"frame_compile_id\": null, \"attempt\": 0";
    let key = "\"inductor_post_grad_graph\": {}";
    let a = log().record(key, id, graph).end(0, 0);
    let b = log().record(key, id, &format!("{graph}{odd}")).end(0, 0);
    let run = compare_ranks(&read(&[a, b]));
    assert_eq!((run.collectives, run.groups), (1, 1));
    let codes: Vec<_> = run.diagnostics.iter().map(|d| d.code.id).collect();
    assert_eq!(codes, ["T1418"]);
}

#[test]
fn each_line_of_the_budget_and_each_rule_of_structure_can_turn() {
    let steady = log().compile(0, 0, &[SUM]);
    assert!(examine(&[steady.clone(), steady.clone()]).passes());
    let mut late = steady.clone();
    let mut layers = steady.clone();
    for frame in 0..4 {
        layers = layers.broken(frame, 7);
    }
    for minute in 0..3 {
        late.seconds = 605 + minute * 60;
        late = late.compile(0, minute + 1, &[SUM]);
    }
    late.seconds = 790;
    let late = late.record("\"str\": [\"a\", 9]", "", "");
    let report = examine(&[late.clone(), late]);
    assert_eq!(failing(&report), ["recompiles_after_warm_up"]);
    let applies = |report: &CompileReport| -> Vec<&'static str> {
        report.structure.iter().filter(|r| r.applies()).map(|r| r.title).collect()
    };
    assert_eq!(applies(&report), ["a frame nears its recompile limit", "unique graphs keep growing"]);
    let report = examine(&[layers.clone(), layers]);
    assert_eq!(
        (failing(&report), applies(&report)),
        (vec!["breaks", "unlogged"], vec!["a break repeats with the layers"])
    );
    // At the recompile limit PyTorch logs a failed compile, and runs the frame eagerly.
    let failed =
        r#""compilation_metrics": {"compile_id": "0/1", "fail_type": "Unsupported", "fail_reason": "limit"}"#;
    let full = steady.clone().record(failed, &context(0, 1), "");
    let report = examine(&[full.clone(), full]);
    assert_eq!(
        (failing(&report), applies(&report)),
        (vec!["unlogged"], vec!["a whole function runs eagerly"])
    );
    // A gap in the numbers, and a compile without a graph or an end.
    let gap = steady.clone().compile(0, 2, &[SUM]);
    assert_eq!(failing(&examine(&[gap.clone(), gap])), ["unlogged"]);
    let bare = steady.clone().start(1, 0).end(1, 0);
    assert_eq!(failing(&examine(&[bare.clone(), bare])), ["unlogged"]);
}

#[test]
fn text_that_is_no_trace_is_refused() {
    for text in ["", "hello\n", "\t{}\n", "V1123 22:10:58 1 a.py:1] [1]\n"] {
        assert_eq!(read_log("log", Some(0), text.as_bytes()).unwrap_err().code, &T1410, "{text}");
    }
}
