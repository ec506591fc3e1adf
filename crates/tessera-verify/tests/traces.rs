//! Tests of observed sequences under the rules for plans.
#![allow(clippy::unwrap_used)]

mod common;

use common::{assert_clean, assert_only, diagnostic_text};
use tessera_base::{Counterexample, Diagnostics, Span};
use tessera_verify::{ObservedCall, Traces, check_traces};

/// Verifies traces given as `op group dtype count [key=value…]` per launch.
fn verify_traces(groups: &[(&str, &[u32])], ranks: &[&[&str]]) -> Diagnostics {
    let mut t = Traces::new();
    for (rank, lines) in ranks.iter().enumerate() {
        let at = t.add_rank(rank as u32, &format!("rank{rank}.jsonl"));
        for (n, line) in lines.iter().enumerate() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let mut call = ObservedCall {
                op: words[0].into(),
                dtype: words[2].into(),
                count: words[3].parse().unwrap(),
                ..ObservedCall::default()
            };
            let (mut stream, mut batch) = (words[1], 0);
            let counts = |v: &str| v.split(',').map(|n| n.parse().unwrap()).collect::<Vec<u64>>();
            for (k, v) in words[4..].iter().map(|w| w.split_once('=').unwrap()) {
                match k {
                    "reduction" => call.reduction = Some(v.into()),
                    "root" => call.root = v.parse().ok(),
                    "peer" => call.peer = v.parse().ok(),
                    "graph" => call.graph = Some(v.into()),
                    "send" => call.per_peer.get_or_insert_default().0 = counts(v),
                    "take" => call.per_peer.get_or_insert_default().1 = counts(v),
                    "stream" => stream = v,
                    "batch" => batch = v.parse().unwrap(),
                    _ => panic!("{k}"),
                }
            }
            let members = groups.iter().find(|g| g.0 == words[1]).unwrap().1;
            let group = t.add_group(words[1], members);
            t.push_launch(at, group, call, stream, batch, Span { start: n, end: n + 1 });
        }
    }
    check_traces(&t)
}

const TP: &[(&str, &[u32])] = &[("tp", &[0, 1])];

#[test]
fn equal_sequences_pass() {
    let lines: &[&str] = &["all_reduce tp bf16 8 reduction=sum", "all_gather tp bf16 4"];
    assert_clean(&verify_traces(TP, &[lines, lines]));
}

#[test]
fn every_field_is_compared_and_shapes_are_not() {
    let base = "all_reduce tp bf16 8 reduction=sum";
    for (other, code) in [
        ("all_gather tp bf16 8 reduction=sum", "T0301"),
        ("all_reduce tp bf16 16 reduction=sum", "T0302"),
        ("all_reduce tp f32 8 reduction=sum", "T0303"),
        ("all_reduce tp bf16 8 reduction=max", "T0304"),
        ("all_reduce tp bf16 8 reduction=sum root=1", "T0305"),
        ("all_reduce tp bf16 8 reduction=sum graph=g", "T0334"),
    ] {
        let found = verify_traces(TP, &[&[base, base], &[base, other]]);
        assert_only(&found, code);
        assert!(
            diagnostic_text(&found).contains("position 1 of the tp group"),
            "{}",
            diagnostic_text(&found)
        );
        let Some(Counterexample::Mismatch(m)) = found[0].counterexample.as_deref() else { panic!() };
        assert_eq!((m.position, m.sides[1].0), (1, 1));
    }
    assert_only(&verify_traces(TP, &[&[base, base], &[base]]), "T0307");
}

#[test]
fn the_divergent_rank_is_named_even_if_it_is_the_first() {
    let groups: &[(&str, &[u32])] = &[("ep", &[0, 1, 2, 3])];
    let (odd, right): (&[&str], &[&str]) = (&["all_gather ep f32 7"], &["all_gather ep f32 8"]);
    let found = verify_traces(groups, &[odd, right, right, right]);
    assert_only(&found, "T0302");
    assert!(found[0].message.starts_with("rank 0 differs from rank 1"), "{}", diagnostic_text(&found));
}

#[test]
fn orders_over_two_groups_contradict() {
    let groups: &[(&str, &[u32])] = &[("tp0", &[0, 1]), ("tp1", &[2, 3]), ("dp0", &[0, 2]), ("dp1", &[1, 3])];
    let order = |tp: &'static str, dp: &'static str, first_tp: bool| -> [String; 2] {
        let (t, d) = (format!("all_reduce {tp} f32 4"), format!("all_reduce {dp} f32 4"));
        if first_tp { [t, d] } else { [d, t] }
    };
    let run = |last: bool, stream: &str| {
        let of = |l: [String; 2]| l.map(|l| format!("{l}{stream}"));
        let all = [
            of(order("tp0", "dp0", true)),
            of(order("tp0", "dp1", false)),
            of(order("tp1", "dp0", false)),
            of(order("tp1", "dp1", last)),
        ];
        let lines: Vec<Vec<&str>> = all.iter().map(|l| l.iter().map(String::as_str).collect()).collect();
        verify_traces(groups, &lines.iter().map(Vec::as_slice).collect::<Vec<_>>())
    };
    // With each group on a stream of its own, only the launch orders contradict each other.
    assert_only(&run(true, ""), "T0312");
    assert_only(&run(true, " stream=7"), "T0311");
    assert_clean(&run(false, ""));
    let found = run(true, " stream=7");
    let Some(Counterexample::WaitCycle(links)) = found[0].counterexample.as_deref() else { panic!() };
    assert_eq!(links.len(), 4, "{}", diagnostic_text(&found));
}

#[test]
fn grouped_sends_and_receives_are_one_launch() {
    let both = |batch: &str| {
        let lines = |peer: u32| {
            [format!("send tp f32 4 peer={peer}{batch}"), format!("recv tp f32 4 peer={peer}{batch}")]
        };
        let all = [lines(1), lines(0)];
        let lines: Vec<Vec<&str>> = all.iter().map(|l| l.iter().map(String::as_str).collect()).collect();
        verify_traces(TP, &lines.iter().map(Vec::as_slice).collect::<Vec<_>>())
    };
    assert_only(&both(""), "T0311");
    assert_clean(&both(" batch=1"));
}

#[test]
fn exchanged_counts_agree_both_ways() {
    let run = |b: &str| verify_traces(TP, &[&["all_to_all tp bf16 5 send=2,3 take=2,1"], &[b]]);
    assert_clean(&run("all_to_all tp bf16 5 send=1,4 take=3,4"));
    assert_only(&run("all_to_all tp bf16 5 send=1,4 take=2,4"), "T0338");
    assert_only(&run("all_to_all tp bf16 5 send=1,4,0 take=3,4,0"), "T0338");
}

#[test]
fn a_non_member_and_a_missing_trace_are_reported() {
    let groups: &[(&str, &[u32])] = &[("mesh", &[1, 2])];
    let call: &[&str] = &["broadcast mesh f32 4 root=1"];
    assert_only(&verify_traces(groups, &[call, call, call]), "T0342");
    assert_clean(&verify_traces(groups, &[&[], call, call]));
    assert_only(&verify_traces(groups, &[&[], call]), "T0341");
    assert_only(&verify_traces(TP, &[&["send tp f32 4"], &[]]), "T0342");
    assert_only(&verify_traces(TP, &[&["send tp f32 4 peer=0"], &[]]), "T0342");
}

#[test]
fn an_impossible_rank_number_allocates_no_memory() {
    let mut t = Traces::new();
    t.add_rank(u32::MAX, "rank4294967295.jsonl");
    assert_only(&check_traces(&t), "T0341");
}

#[test]
fn members_of_a_group_are_a_set() {
    let twice: &[(&str, &[u32])] = &[("tp", &[1, 0, 1])];
    let call: &[&str] = &["all_reduce tp f32 4"];
    assert_clean(&verify_traces(twice, &[call, call]));
    assert_only(&verify_traces(twice, &[call, &[]]), "T0307");
}

#[test]
fn a_send_matches_only_receives() {
    assert_only(&verify_traces(TP, &[&["send tp f32 4 peer=1"], &["all_reduce tp f32 4 peer=0"]]), "T0308");
    assert_clean(&verify_traces(TP, &[&["send tp f32 4 peer=1"], &["recv tp f32 4 peer=0"]]));
}

#[test]
fn a_group_of_other_traces_is_ignored() {
    let (mut t, mut other) = (Traces::new(), Traces::new());
    let group = other.add_group("tp", &[0]);
    let at = t.add_rank(0, "rank0.jsonl");
    t.push_launch(at, group, ObservedCall::default(), "", 0, Span::default());
    assert_clean(&check_traces(&t));
}
