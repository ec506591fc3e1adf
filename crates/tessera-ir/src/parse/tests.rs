//! Tests of manually written text, round trips and invalid text.

use super::*;
use crate::Attr;
use crate::{print, print_fragment};
use proptest::prelude::*;

const MLP_PROGRAM: &str = r#"
// One column-parallel and one row-parallel matmul.
program @mlp role(stage0) mesh( tp = 2 ) streams(compute, tp_collective) {
  buffer @kv.0.k : f32[90, 24] {tp: shard(1)}
  %x = input : f32[30, 48]
  %start=call:i64
  %row = call "row" : i64
  %w = weight "up.weight" {load="patch"} : f32[24, 48] {tp: shard(0)}
  %v = weight "down.weight" : f32[48, 24] {tp:shard(1)}
  %h = ttile.matmul
         %x,
         %w {act = "silu"}
  %r = ttile.rope %h, start = %start {grid = [3, 5, 2], head_dim = 12} @compute
  cache.write @kv.0.k, row=%row, %r @compute
  %c = cache.read @kv.0.k {row = 0, rows = 30} : f32[30, 24] {tp: shard(1)}
  %p = ttile.matmul %c, %v : f32[30, 48] {tp: partial(sum)}
  %e = event.record @compute
  %t = ttile.collective.issue all_reduce %p {axis="tp", reduction="sum"} @tp_collective after(%e)
  %y = ttile.collective.wait %t : f32[30, 48] {tp: replicated} @compute
  output "y", %y
}
"#;

fn codes(body: &str) -> Vec<&'static str> {
    let text = format!("program @p role(r) mesh(tp=2) streams(compute) {{\n{body}\n}}");
    match parse(&text, "t") {
        Ok(_) => vec![],
        Err(ds) => ds.iter().map(|d| d.code.id).collect(),
    }
}

#[test]
fn hand_written_text_becomes_canonical() {
    let p = parse(MLP_PROGRAM, "two.tir").unwrap();
    assert_eq!(p.ops.len(), 14);
    assert_eq!(p.ops[0].name.as_deref(), Some("x"));
    let span = p.ops[5].span.unwrap();
    assert_eq!(
        &MLP_PROGRAM[span.start..span.end],
        "%h = ttile.matmul\n         %x,\n         %w {act = \"silu\"}"
    );
    let text = print(&p);
    let again = parse(&text, "again").unwrap();
    assert_eq!(again.clone().without_spans(), p.without_spans());
    assert_eq!(print(&again), text);
}

#[test]
fn every_mistake_is_reported_once() {
    let body = "%x = input \"x\" : f32[4, 6]
        %a = ttile.matmull %x, %x
        %b = ttile.silu %a
        %c = ttile.silu %z
        %d = ttile.silu %x {slope = 1}
        %e = ttile.silu %x : f32[4, 7]
        %f = ttile.silu ?
        %x = ttile.silu %x
        %g = ttile.collective.all_gather %x {axis = \"tp\", dim = 0}
        output \"y\", %f @elsewhere";
    assert_eq!(codes(body), ["T0202", "T0204", "T0203", "T0205", "T0201", "T0204", "T0212", "T0204"]);
}

#[test]
fn a_misspelt_op_gets_a_hint() {
    let text = "program @p { %x = input : f32[2, 2] %y = ttile.silu %x }";
    let ds = parse(text, "t").unwrap_err();
    assert_eq!(ds[0].hint.as_deref(), Some("did you mean `toperator.silu`?"));
    assert_eq!(ds.len(), 1);
}

#[test]
fn the_role_determines_the_shard() {
    let text = |role: &str| {
        format!(
            "program @p role({role}) mesh(tp=2) streams(compute) {{
               %x = input \"x\" : f32[5, 4]
               %s = ttile.take_shard %x {{axis = \"tp\", dim = 0}}
             }}"
        )
    };
    let local = |role| parse(&text(role), "t").unwrap().values[1].ty.shape[0];
    assert_eq!([local("stage0"), local("stage0@tp0"), local("stage0@tp1")], [3, 3, 2]);
}

#[test]
fn several_programs_in_one_text() {
    let text = "program @a {} program @b role(r@tp1@pp0) mesh(tp=2) {}";
    let ps = parse_all(text, "t").unwrap();
    assert_eq!([ps[0].name.as_str(), ps[1].role.as_str()], ["a", "r@tp1@pp0"]);
    assert_eq!(parse(text, "t").unwrap_err()[0].code.id, "T0201");
    assert!(parse_all("", "t").unwrap().is_empty());
}

const FRAGMENT: &str = r#"%S_rs  = ttile.collective.reduce_scatter %S_partial {axis="tp"}  // logits shards
%P     = ttile.softmax %S_rs                                    // local softmax
%Y = toperator.moe_route %P, %G, @Experts
     { a2a_axis="ep", quantize_fp8=true, capacity_factor=1.25, pack_fused=true }
"#;

#[test]
fn ops_without_a_program_are_a_fragment() {
    let f = parse_fragment(FRAGMENT, "t").unwrap();
    let free: Vec<&str> = f.undefined_values().iter().map(|n| n.text.as_str()).collect();
    assert_eq!(free, ["S_partial", "G"]);
    assert_eq!(f.ops[2].symbol.as_ref().map(|s| &FRAGMENT[s.span.start..s.span.end]), Some("@Experts"));
    assert_eq!(&FRAGMENT[f.ops[1].span.start..f.ops[1].span.end], "%P     = ttile.softmax %S_rs");
    assert!(f.ops[2].attrs["pack_fused"] == Attr::Bool(true));
    let review = f.review("t");
    let codes: Vec<&str> = review.iter().map(|d| d.code.id).collect();
    assert_eq!(codes, ["T0215", "T0215", "T0215", "T0206"]);
    assert!(review[0].notes[0].contains("wrong by O(1)"), "{review:#?}");
    // A fragment that mixes dialects cannot become one program, which a note explains.
    assert!(review[3].notes.iter().any(|n| n.contains("cannot contain both")), "{review:#?}");
    assert!(review[3].notes[0].contains("mesh(tp=…, ep=…)"), "{review:#?}");
}

#[test]
fn a_program_is_not_a_fragment() {
    for text in
        ["", "// nothing", "program @p {}", "// a\nprogram @p {}", "progam @p {}", "}", "buffer @b : f32"]
    {
        assert!(!is_fragment(text), "{text}");
    }
    for text in [FRAGMENT, "// a\n%x, %y = q", "output \"y\", %y", "if %x {", "ttile.silu"] {
        assert!(is_fragment(text), "{text}");
    }
}

#[test]
fn branches_are_rejected_with_a_reason() {
    for body in ["if %x { }", "%y = ttile.select %x, %x", "%y = ttile.silu %x, when=%x", "ttile.while %x"] {
        let text = format!("program @p role(r) mesh(tp=2) {{ %x = input : f32[2]\n{body}\n}}");
        let ds = parse(&text, "t").unwrap_err();
        assert_eq!(ds.len(), 1, "{body}: {ds:#?}");
        assert!(ds[0].hint.as_deref().is_some_and(|h| h.contains("no branches")), "{body}: {ds:#?}");
    }
}

proptest! {
    #[test]
    fn arbitrary_text_never_panics(text in "\\PC{0,200}") {
        let _ = parse_all(&text, "t");
        let _ = (is_fragment(&text), parse_fragment(&text, "t").map(|f| f.review("t")));
    }

    #[test]
    fn damaged_fragments_never_panic(at in 0usize..330, del in 0usize..40, ins in "[-%@{}()\\[\\],=:0-9a-z \n\"]{0,12}") {
        let mut text: Vec<char> = FRAGMENT.chars().collect();
        let at = at.min(text.len());
        let end = (at + del).min(text.len());
        text.splice(at..end, ins.chars());
        let text: String = text.into_iter().collect();
        if let Ok(f) = parse_fragment(&text, "t") {
            let _ = f.review("t");
            let printed = print_fragment(&f);
            let again = parse_fragment(&printed, "again").map_err(|d| TestCaseError::fail(format!("{d:?}\n{printed}")))?;
            prop_assert_eq!(print_fragment(&again), printed);
            prop_assert_eq!(again.without_spans(), f.without_spans());
        }
    }

    #[test]
    fn damaged_text_never_panics(at in 0usize..1100, del in 0usize..40, ins in "[-%@{}()\\[\\],=:0-9a-z \n\"]{0,12}") {
        let mut text: Vec<char> = MLP_PROGRAM.chars().collect();
        let at = at.min(text.len());
        let end = (at + del).min(text.len());
        text.splice(at..end, ins.chars());
        let text: String = text.into_iter().collect();
        if let Ok(ps) = parse_all(&text, "t") {
            for p in ps {
                let printed = print(&p);
                let again = parse(&printed, "again").map_err(|d| TestCaseError::fail(format!("{d:?}\n{printed}")))?;
                prop_assert_eq!(again.without_spans(), p.without_spans());
            }
        }
    }

    #[test]
    fn numbers_of_any_size_never_panic(n in proptest::collection::vec(any::<i64>(), 12), which in 0usize..6) {
        let op = [
            "%y = ttile.depth_to_space_time %x {grid = [N, N, N], patch = [N, N], stride = [N, N, N]}",
            "%y = ttile.compact %x {extent = N, parts = N, unit = N}",
            "%y = ttile.take_shard %x {axis = \"tp\", dim = 0, unit = N}",
            "%z = weight \"z\" : f32[N, 4] {tp: shard(0, extent=N, unit=N)} %y = ttile.pad %z {axis = \"tp\", dim = 0, rows = N}",
            "%z = weight \"z\" : f32[N, N] {tp: shard(0)} %y = ttile.collective.all_gather %z {axis = \"tp\", dim = 0}",
            "%s = call : i64 %y = ttile.rope %x, start=%s {frame_stride = N, grid = [N, N, N], head_dim = N}",
        ][which];
        let mut n = n.into_iter();
        let body: String = op.split('N').enumerate().map(|(i, part)| match i {
            0 => part.to_string(),
            _ => format!("{}{part}", n.next().unwrap_or(1).unsigned_abs() >> (i * 5)),
        }).collect();
        let _ = codes(&format!("%x = input \"x\" : f32[6, 4]\n{body}"));
    }
}
