//! Tests of the frame codec: round trips, rejected frames, and random bytes.

#![allow(clippy::disallowed_methods, reason = "a test compares a page with a table")]

mod support;

use proptest::prelude::*;
use support::{plan_digest, prompt_tensor, test_programs, test_stream};
use tessera_runtime::director::{ChunkRequest, Director};
use tessera_runtime::kv_cache::CacheRegime;
use tessera_runtime::wire::{
    ArrayCall, ArrayOutputs, CallAction, CallContext, CallObservation, ChangeEffect, ChangedSetting,
    CollectiveTimes, Commit, Done, Dtype, ENVELOPE_FIELDS, Envelope, EnvelopeHeader, F32Bits, FaultReport,
    FinishReason, HEADER_BYTES, Heartbeat, HelloAck, Init, MAX_META_BYTES, MAX_TENSORS, Message, MessageKind,
    OpClassWork, PhaseCall, PhaseOpTimes, Progress, RankMemory, Ready, Refused, Reload, RequestLimit,
    ScalarArg, SenderRole, ShardFingerprint, StreamChange, Tensor, Tensors, TokenEvent, WIRE_VERSION,
    Welcome, decode, decode_header, encode, envelope_reference,
};
use tessera_runtime::{CheckSite, Digest, Failure, FailureClass, Parity, ParityClass};

fn failure() -> Failure {
    Failure {
        class: FailureClass::Drift,
        rank: Some(1),
        site: CheckSite::Leader,
        code: "T0744".into(),
        text: "output differs".into(),
    }
}

fn envelope() -> Envelope {
    let mut director = Director::new(test_stream(CacheRegime::Resident)).expect("legal");
    let request = ChunkRequest { prompt_change: true, seed: 7, ..ChunkRequest::default() };
    let plan_of = director.plan_chunk(&request, &test_programs()).expect("planned");
    let header = EnvelopeHeader {
        version: WIRE_VERSION,
        action: CallAction::Infer,
        plan: plan_digest(),
        session: 1,
        call_id: 1,
        chunk: 0,
        cache_epoch: 0,
        deadline_ms: 5000,
    };
    Envelope { header, meta: plan_of.meta, reload: None, tensors: Tensors(vec![prompt_tensor(3)]) }
}

fn phase_op_times() -> PhaseOpTimes {
    let collective = CollectiveTimes { op: 1, issued_ns: 7, waiting_ns: 8, completed_ns: u64::MAX };
    PhaseOpTimes {
        start_ns: 1 << 50,
        begins_ns: vec![0, 5, 8],
        ends_ns: vec![4, 5, 9],
        end_ns: 9,
        collectives: vec![collective],
    }
}

fn every_message() -> Vec<Message> {
    let parity = Parity::default().with_key("k", ParityClass::BestEffort, "v");
    let observed = CallObservation {
        generator_calls: 3,
        collectives: 99,
        trace: plan_digest(),
        state: plan_digest(),
        output: plan_digest(),
        compensated: 0,
        phase_ns: vec![1, u64::MAX],
        new_programs: 2,
        digest_ns: 77,
        weights: plan_digest(),
        memory: RankMemory {
            allocated_bytes: 1 << 40,
            workspace_bytes: 1,
            peak_bytes: u64::MAX,
            unused_bytes: 0,
            slot_reuses: 300,
        },
        phase_bytes: vec![0, 1 << 33],
        phase_classes: vec![
            Vec::new(),
            vec![OpClassWork { class: "matmul".into(), ops: 3, ns: 9, sent_bytes: 0 }],
        ],
        phase_op_times: vec![phase_op_times()],
    };
    let fingerprint = ShardFingerprint {
        tensor: "ffn".into(),
        slice: "[0..4]".into(),
        digest: plan_digest(),
        constant: true,
    };
    let fingerprints = vec![fingerprint];
    vec![
        Message::Welcome(Welcome {
            rank: 1,
            world_size: 2,
            session: 3,
            control_sockets: 1,
            extra_fds: 0,
            payload: vec![0; 9],
        }),
        Message::Stop,
        Message::Init(Init {
            wire_version: WIRE_VERSION,
            build: "b".into(),
            plan: plan_digest(),
            session: 3,
            parity: parity.clone(),
        }),
        Message::Envelope(Box::new(envelope())),
        Message::Context(CallContext { call_id: 2, tensors: Tensors(vec![prompt_tensor(1)]) }),
        Message::Commit(Commit { call_id: 2 }),
        Message::Abort(failure()),
        Message::HelloAck(HelloAck {
            build: "b".into(),
            plan: plan_digest(),
            parity,
            fingerprints: fingerprints.clone(),
        }),
        Message::Ready(Ready { call_id: 2, predicted_state: plan_digest(), inputs: Digest::default() }),
        Message::Refused(Refused { call_id: 2, failure: failure() }),
        Message::Done(Box::new(Done {
            call_id: 2,
            cache_epoch: 1,
            observed,
            fingerprints,
            output: Tensors(vec![prompt_tensor(2)]),
        })),
        Message::Fault(FaultReport { failure: failure(), secondary: true }),
        Message::Heartbeat(Heartbeat { progress: 1 << 40 }),
        Message::Progress(Progress {
            chunk: 1,
            request: 3,
            epoch: 2,
            frames: 12,
            phases: vec![("text".into(), 5)],
            queued_in: 2,
            queued_out: 1,
            call_ns: 9,
            ids: vec![TokenEvent { text: 1, id: 7, finish: Some(FinishReason::EndId) }],
        }),
        Message::Finished,
        Message::ArrayCall(ArrayCall {
            number: 1,
            program: "array.f".into(),
            inputs: Tensors(vec![prompt_tensor(1)]),
        }),
        Message::ArrayOutputs(ArrayOutputs {
            number: 1,
            op_times: vec![(3, phase_op_times())],
            outputs: Tensors(vec![prompt_tensor(2)]),
        }),
        Message::StreamChange(StreamChange {
            number: 1,
            setting: ChangedSetting::Prompt("a red kite".into()),
        }),
        Message::RequestLimit(RequestLimit { chunks: 5 }),
        Message::ChangeEffect(ChangeEffect { number: 1, chunk: 4 }),
        Message::Failed(failure()),
    ]
}

#[test]
fn every_message_round_trips_and_has_a_sender() {
    let all = every_message();
    assert_eq!(all.len(), MessageKind::ALL.len());
    for m in all {
        let frame = encode(3, &m).expect("within limits");
        assert_eq!(decode(&frame).expect("reads"), (3, m.clone()));
        assert_eq!(encode(3, &m).expect("within limits"), frame, "equal content has equal bytes");
        let worker_sends = matches!(
            m,
            Message::HelloAck(_)
                | Message::Ready(_)
                | Message::Refused(_)
                | Message::Done(_)
                | Message::Fault(_)
        );
        assert_eq!(m.kind().allowed_sender() == SenderRole::Worker, worker_sends, "{:?}", m.kind());
    }
}

// proves: C-03, C-16
#[test]
fn an_unknown_version_is_refused_from_the_header_alone_with_both_versions() {
    let mut frame = encode(0, &Message::Stop).expect("within limits");
    frame[4..6].copy_from_slice(&(WIRE_VERSION + 1).to_le_bytes());
    // Lengths that no host could allocate.
    frame[8..20].fill(0xff);
    let head: [u8; HEADER_BYTES] = frame[..HEADER_BYTES].try_into().expect("long enough");
    let d = decode_header(&head).expect_err("refused");
    assert_eq!(d.code.id, "T0701");
    assert_eq!(
        d.message,
        format!("the peer uses wire version {}, this process uses {WIRE_VERSION}", WIRE_VERSION + 1)
    );
}

#[test]
fn a_reload_envelope_round_trips() {
    let Envelope { header, .. } = envelope();
    let reload = Reload { source: "models/other".into(), weights: plan_digest() };
    let header = EnvelopeHeader { action: CallAction::Reload, ..header };
    let e = Envelope { header, meta: None, reload: Some(reload), tensors: Tensors::default() };
    let m = Message::Envelope(Box::new(e));
    assert_eq!(decode(&encode(0, &m).expect("within limits")).expect("reads"), (0, m));
}

#[test]
fn damaged_frames_are_refused_with_the_matching_code() {
    let good = encode(0, &Message::Envelope(Box::new(envelope()))).expect("within limits");
    let code = |frame: &[u8]| decode(frame).expect_err("refused").code.id;
    let with = |at: usize, bytes: &[u8]| {
        let mut frame = good.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frame
    };
    assert_eq!(code(&with(0, b"HTTP")), "T0702");
    assert_eq!(code(&with(6, &999u16.to_le_bytes())), "T0702");
    assert_eq!(code(&with(8, &9u32.to_le_bytes())), "T0704", "the checksum covers the origin");
    assert_eq!(code(&with(12, &(MAX_META_BYTES + 1).to_le_bytes())), "T0703");
    assert_eq!(code(&with(16, &u32::MAX.to_le_bytes())), "T0703");
    assert_eq!(code(&with(good.len() - 1, &[good[good.len() - 1] ^ 1])), "T0704");
    assert_eq!(code(&good[..10]), "T0702");
    assert_eq!(code(&good[..good.len() - 1]), "T0705");
    assert_eq!(code(&[&good[..], &[0]].concat()), "T0705");
}

/// Edits a frame's meta and tensors, and corrects the lengths and the checksum.
fn reframe(frame: &[u8], edit: impl Fn(&mut Vec<u8>, &mut Vec<u8>)) -> Vec<u8> {
    let meta_len = u32::from_le_bytes(frame[12..16].try_into().expect("four")) as usize;
    let mut meta = frame[HEADER_BYTES..HEADER_BYTES + meta_len].to_vec();
    let mut tensors = frame[HEADER_BYTES + meta_len..].to_vec();
    edit(&mut meta, &mut tensors);
    let mut head = frame[..12].to_vec();
    head.extend((meta.len() as u32).to_le_bytes());
    head.extend((tensors.len() as u32).to_le_bytes());
    let sum = xxhash(&[&head[..], &meta, &tensors].concat());
    [head, sum.to_le_bytes().to_vec(), meta, tensors].concat()
}

fn xxhash(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

// proves: C-07, C-15
#[test]
fn invalid_contents_in_a_valid_frame_are_refused() {
    let commit = encode(0, &Message::Commit(Commit { call_id: 1 })).expect("within limits");
    assert_eq!(reframe(&commit, |_, _| {}), commit, "the test's framing matches the encoder");
    let code = |frame: Vec<u8>| decode(&frame).expect_err("refused").code.id;
    assert_eq!(code(reframe(&commit, |m, _| m.push(0))), "T0705", "trailing bytes");
    assert_eq!(code(reframe(&commit, |m, _| m.clear())), "T0705", "a missing field");
    assert_eq!(code(reframe(&commit, |m, _| *m = vec![0x81, 0x00])), "T0705", "a longer integer than needed");
    assert_eq!(code(reframe(&commit, |_, t| t.push(0))), "T0706", "tensors in a message without tensors");
    let context = encode(
        0,
        &Message::Context(CallContext {
            call_id: 1,
            tensors: Tensors(vec![
                prompt_tensor(1),
                Tensor::from_f32("other", &[8], &[9.0; 8]).expect("fits"),
            ]),
        }),
    )
    .expect("within limits");
    assert_eq!(code(reframe(&context, |_, t| t.rotate_left(32))), "T0706", "tensors in another order");
    assert_eq!(code(reframe(&context, |_, t| t.truncate(32))), "T0706", "a listed tensor that was not sent");
    assert_eq!(code(reframe(&context, |_, t| t.extend([0; 4]))), "T0706", "bytes outside the manifest");
}

/// Returns the frame of an envelope with one phase of these arguments.
fn encode_call(args: Vec<(String, ScalarArg)>) -> Vec<u8> {
    let mut e = envelope();
    e.meta.as_mut().expect("a call").phases = vec![PhaseCall::new("denoise", args)];
    encode(0, &Message::Envelope(Box::new(e))).expect("fits")
}

// proves: C-07
#[test]
fn argument_order_does_not_change_the_bytes_of_an_envelope() {
    let args: Vec<(String, ScalarArg)> = (0..6)
        .map(|i| (format!("a{i}"), ScalarArg::from_f32(if i == 3 { -f32::NAN } else { i as f32 })))
        .collect();
    let want = encode_call(args.clone());
    let mut order = args;
    for i in 0..1000usize {
        let n = order.len();
        order.swap(i % n, (i * 7 + 3) % n);
        assert_eq!(encode_call(order.clone()), want, "order {i}");
    }
    order[0].1 = ScalarArg::from_f32(9.5);
    assert_ne!(encode_call(order), want, "another value has other bytes");
}

// proves: C-07
#[test]
fn a_nan_has_one_encoding() {
    let call = |x: f32| encode_call(vec![("x".into(), ScalarArg::from_f32(x))]);
    let (a, b) = (f32::from_bits(0x7fc0_0001), f32::from_bits(0xffff_ffff));
    assert_eq!(call(a), call(b));
    assert_ne!(call(0.0), call(-0.0));
    assert!(F32Bits::try_from(0x7fc0_0001).is_err() && F32Bits::try_from(0x7fc0_0000).is_ok());
}

#[test]
fn tensors_that_contradict_their_shape_or_the_limits_are_refused() {
    assert!(Tensor::new("x", Dtype::Bf16, &[2, 3], vec![0; 11]).is_err());
    assert!(Tensor::new("x", Dtype::I64, &[u64::MAX, 9], vec![]).is_err());
    assert!(Tensor::new("x", Dtype::F32, &[1; 9], vec![0; 4]).is_err());
    let bf16 = Tensor::new("x", Dtype::Bf16, &[1], vec![0x80, 0x3f]).expect("fits");
    assert_eq!(bf16.to_f32(), Some(vec![1.0]));
    let many = (0..=MAX_TENSORS).map(|i| Tensor::from_f32(&i.to_string(), &[1], &[0.0]).expect("fits"));
    let message = |tensors| Message::Context(CallContext { call_id: 1, tensors: Tensors(tensors) });
    assert_eq!(encode(0, &message(many.collect())).expect_err("refused").code.id, "T0706");
    assert_eq!(
        encode(0, &message(vec![prompt_tensor(1), prompt_tensor(1)])).expect_err("refused").code.id,
        "T0706"
    );
}

#[test]
fn the_reference_page_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/envelope.md");
    let page = std::fs::read_to_string(path).expect("docs/reference/envelope.md is there");
    assert!(
        page == envelope_reference(),
        "docs/reference/envelope.md is out of date; regenerate it with\n  \
         cargo run -p tessera-runtime --example envelope_reference > docs/reference/envelope.md"
    );
    for f in ENVELOPE_FIELDS {
        assert!(f.codes.split(", ").all(|id| tessera_runtime::CODES.iter().any(|c| c.id == id)), "{f:?}");
    }
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = decode(&bytes);
    }

    // proves: C-14
    #[test]
    fn random_meta_in_a_valid_frame_never_panics(
        kind in 0..MessageKind::ALL.len(),
        meta in proptest::collection::vec(any::<u8>(), 0..300),
        tensors in proptest::collection::vec(any::<u8>(), 0..40),
    ) {
        let mut frame = encode(0, &Message::Stop).expect("within limits");
        frame[6..8].copy_from_slice(&(MessageKind::ALL[kind] as u16).to_le_bytes());
        let frame = reframe(&frame, |m, t| (m.clone_from(&meta), t.clone_from(&tensors)).0);
        if let Ok((origin, message)) = decode(&frame) {
            prop_assert_eq!(encode(origin, &message).expect("decoded before"), frame);
        }
    }

    #[test]
    fn a_changed_meta_byte_is_rejected_or_round_trips(at in 0usize..600, with in any::<u8>()) {
        let good = encode(0, &Message::Envelope(Box::new(envelope()))).expect("within limits");
        let frame = reframe(&good, |m, _| {
            let at = at % m.len();
            m[at] = with;
        });
        if let Ok((origin, message)) = decode(&frame) {
            prop_assert_eq!(encode(origin, &message).expect("decoded before"), frame);
        }
    }
}
