//! Each field of the envelope, broken once: refused with the code that the table promises.

mod support;

use support::{SESSION, census, context, plan, stream, text};
use tessera_runtime::cache::{Cache, Regime};
use tessera_runtime::check::{Local, check_context, check_envelope};
use tessera_runtime::decide::{ChunkRequest, Cut, Director};
use tessera_runtime::wire::{
    CallAction, CallMeta, Envelope, EnvelopeHeader, F32Bits, FIELDS, Reload, Tensor, Tensors, WIRE_VERSION,
};
use tessera_runtime::{Digest, Tripwires};

/// The second call of a recompute stream with a new prompt, and the state before it.
fn second_call() -> (Envelope, Cache) {
    let mut director = Director::new(stream(Regime::Recompute)).expect("legal");
    let request = ChunkRequest { prompt_change: true, seed: 7, cut: Cut::None };
    director.next(&request, &census()).expect("planned");
    let before = director.cache().clone();
    let call = director.next(&request, &census()).expect("planned");
    let header = EnvelopeHeader {
        version: WIRE_VERSION,
        action: CallAction::Infer,
        plan: plan(),
        session: SESSION,
        call_id: 2,
        chunk: call.chunk,
        cache_epoch: call.cache_epoch,
        deadline_ms: 5000,
    };
    (Envelope { header, meta: call.meta, reload: None, tensors: Tensors(vec![text(1)]) }, before)
}

fn codes(e: &Envelope, before: &Cache) -> Vec<&'static str> {
    codes_without(e, before, &Tripwires::default())
}

fn codes_without(e: &Envelope, before: &Cache, tripwires: &Tripwires) -> Vec<&'static str> {
    let census = census();
    let local = Local {
        plan: plan(),
        session: SESSION,
        last_call_id: 1,
        cache: before,
        census: &census,
        open: 0,
        tripwires,
    };
    check_envelope(e, &local).err().unwrap_or_default().iter().map(|d| d.code.id).collect()
}

fn break_field(e: &mut Envelope, field: &str) {
    let Envelope { header: h, meta, reload, tensors } = e;
    let m: &mut CallMeta = meta.as_mut().expect("a chunk");
    match field {
        "version" => h.version += 1,
        "action" => h.action = CallAction::Warmup,
        "reload" => *reload = Some(Reload { source: "elsewhere".into(), weights: plan() }),
        "plan" => h.plan = Digest::default(),
        "session" => h.session += 1,
        "call_id" => h.call_id = 1,
        "chunk" => h.chunk += 1,
        "cache_epoch" => h.cache_epoch += 1,
        "deadline_ms" => h.deadline_ms = 0,
        "meta" => *meta = None,
        "n_steps" => m.n_steps += 1,
        "expected_generator_calls" => m.expected_generator_calls += 1,
        "expected_collectives" => m.expected_collectives -= 1,
        "expected_trace_digest" => m.expected_trace_digest = Digest::default(),
        "reset_kv" => m.reset_kv = true,
        "reset_cross" => m.reset_cross = false,
        "recompute" => m.recompute = false,
        "start_frame" => m.start_frame += 1,
        "seed" => m.seed += 1,
        "prompt_epoch" => m.prompt_epoch -= 1,
        "kv_bias" => m.kv_bias = F32Bits::new(f32::NAN),
        "phases" => m.phases[1].program = "denoise.fill99".into(),
        "predicted_state" => m.predicted_state = Digest::default(),
        "text" => tensors.0.clear(),
        other => panic!("no way to break `{other}` is known: add one beside the field"),
    }
}

#[test]
fn the_untouched_envelope_is_accepted() {
    let (e, before) = second_call();
    assert_eq!(codes(&e, &before), [] as [&str; 0]);
}

#[test]
fn each_field_broken_once_is_refused_with_the_promised_code() {
    for field in FIELDS.iter().filter(|f| f.name != "context") {
        let (mut e, before) = second_call();
        break_field(&mut e, field.name);
        let found = codes(&e, &before);
        assert!(found.contains(&field.checked), "`{}`: {found:?} lacks {}", field.name, field.checked);
        let off = codes_without(&e, &before, &Tripwires::off([field.checked]));
        assert!(!off.contains(&field.checked), "`{}` is found by a tripwire that is off", field.name);
    }
}

#[test]
fn a_recompute_call_takes_its_context_and_no_other() {
    let (e, _) = second_call();
    let meta = e.meta.expect("a chunk");
    let check = |tensors: Vec<Tensor>| {
        check_context(&meta, &Tensors(tensors), &census(), &Tripwires::default())
            .err()
            .unwrap_or_default()
            .first()
            .map(|d| d.code.id)
    };
    let good = context(&Tensor::from_f32("x", &[4], &[0.0; 4]).expect("fits"));
    assert_eq!(check(vec![good.clone()]), None);
    assert_eq!(check(vec![]), Some("T0735"), "no falling back to an older context");
    assert_eq!(check(vec![text(1)]), Some("T0735"));
    assert_eq!(check(vec![good, text(1)]), Some("T0735"));
}

#[test]
fn actions_without_payload_carry_none() {
    let (e, before) = second_call();
    for action in [CallAction::Noop, CallAction::Reset, CallAction::Shutdown] {
        let epoch = u32::from(action == CallAction::Reset);
        let header = EnvelopeHeader { action, cache_epoch: epoch, ..e.header.clone() };
        let bare = Envelope { header, meta: None, reload: None, tensors: Tensors::default() };
        assert_eq!(codes(&bare, &before), [] as [&str; 0], "{action:?}");
        assert_eq!(codes(&Envelope { tensors: Tensors(vec![text(1)]), ..bare.clone() }, &before), ["T0732"]);
        assert_eq!(codes(&Envelope { meta: e.meta.clone(), ..bare }, &before), ["T0732"]);
    }
}

#[test]
fn the_epoch_grows_at_a_hard_cut_and_at_nothing_else() {
    let (mut e, before) = second_call();
    e.header.action = CallAction::Noop;
    (e.meta, e.tensors) = (None, Tensors::default());
    e.header.cache_epoch = 1;
    assert_eq!(codes(&e, &before), ["T0712"]);
    e.header.action = CallAction::Reset;
    assert_eq!(codes(&e, &before), [] as [&str; 0]);
    e.header.cache_epoch = 0;
    assert_eq!(codes(&e, &before), ["T0712"]);
}

#[test]
fn a_phase_at_another_position_or_row_is_refused() {
    for scalar in ["start", "row"] {
        let (mut e, before) = second_call();
        let m = e.meta.as_mut().expect("a chunk");
        let phase = m.phases.iter_mut().find(|p| p.program == "denoise.fill3").expect("one");
        for (name, arg) in &mut phase.args {
            if name == scalar {
                *arg = tessera_runtime::wire::Arg::I64(0);
            }
        }
        assert!(codes(&e, &before).contains(&"T0712"));
    }
}
