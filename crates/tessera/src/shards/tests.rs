//! Wrong, damaged, mutated and exchanged weights on the demo model, ranks as threads.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use tempfile::TempDir;
use tessera_cpu::{Cpu, Pool};
use tessera_plan::{Mapping, Numerics, Strategy, Topology};
use tessera_runtime::decide::{ChunkRequest, Cut, Director};
use tessera_runtime::engine::{Engine, ReadyCall, run_call};
use tessera_runtime::wire::{CallAction, MAX_META_BYTES, Reload, Tensors};
use tessera_runtime::{Tripwires, shards_differ};

use super::*;
use crate::engine::MeshEngine;
use crate::rank::Common;
use crate::studio::Codec;
use crate::{Overrides, comm, plan};

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

fn planned(mesh: &str, strategy: Strategy) -> Arc<Plan> {
    let model = Model::open(&demo(), &Overrides::default()).unwrap_or_else(|ds| panic!("{ds:#?}"));
    let numerics = Mapping::default().numerics;
    let numerics = if strategy == Strategy::Megatron { Numerics::MeshInvariant } else { numerics };
    // A leader outside the mesh holds no weights.
    let (topology, mesh) = match mesh.strip_prefix("pp1 ") {
        Some(mesh) => (Topology::Pp1, mesh),
        None => (Topology::Mesh, mesh),
    };
    let mapping = Mapping { mesh: mesh.parse().unwrap(), topology, strategy, numerics, ..Mapping::default() };
    Arc::new(
        plan::make(&model.video, &model.name, "", &mapping).unwrap_or_else(|ds| panic!("{mesh}: {ds:#?}")),
    )
}

fn weights(plan: &Plan, dir: &Path) -> Weights {
    Model::under(dir, plan).unwrap().weights().unwrap_or_else(|ds| panic!("{ds:#?}"))
}

/// The demo's folder with its tensors changed: `bend` sees each name, shape and bytes.
fn bent(mut bend: impl FnMut(&str, &mut Vec<usize>, &mut Vec<u8>)) -> TempDir {
    let dir = TempDir::new().unwrap();
    for file in ["config.json", "stream.toml", "vocab.txt", "text_encoder.safetensors"] {
        std::fs::copy(demo().join(file), dir.path().join(file)).unwrap();
    }
    let bytes = std::fs::read(demo().join("model.safetensors")).unwrap();
    let tensors: Vec<_> = SafeTensors::deserialize(&bytes)
        .unwrap()
        .iter()
        .map(|(name, t)| {
            let (mut shape, mut data) = (t.shape().to_vec(), t.data().to_vec());
            bend(name, &mut shape, &mut data);
            (name.to_string(), t.dtype(), shape, data)
        })
        .collect();
    let views = tensors.iter().map(|(n, d, s, b)| (n, TensorView::new(*d, s.clone(), b).unwrap()));
    std::fs::write(dir.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap())
        .unwrap();
    dir
}

/// Another checkpoint: every weight a little smaller.
fn another() -> TempDir {
    bent(|_, _, data| {
        for x in data.as_chunks_mut::<2>().0 {
            let smaller = f32::from_bits(u32::from(u16::from_le_bytes(*x)) << 16) * 0.97;
            *x = ((smaller.to_bits() >> 16) as u16).to_le_bytes();
        }
    })
}

/// A rank's engine, which computes nothing with others.
fn lone(plan: &Plan, rank: Rank, source: &mut dyn WeightSource) -> MeshEngine {
    let seat = Seat { mesh: *plan.sealed.mesh(), rank };
    let cpu = Cpu::new(seat, Pool::single(), Vec::new(), Duration::from_secs(1));
    MeshEngine::load(&plan.sealed, rank, Box::new(cpu), source).unwrap_or_else(|d| panic!("{d:#?}"))
}

/// Every rank's fingerprints, each rank with a source of its own.
fn prints<S: WeightSource>(plan: &Plan, mut source: impl FnMut(Rank) -> S) -> BTreeMap<u32, Vec<ShardPrint>> {
    plan.mesh_ranks().map(|r| (r.0, lone(plan, r, &mut source(r)).fingerprints())).collect()
}

/// What is wrong with them, and whose fault it is taken for.
fn told(prints: &BTreeMap<u32, Vec<ShardPrint>>) -> Option<(u32, String)> {
    shards_differ(prints)
}

#[test]
fn sound_ranks_agree_on_every_mesh_and_constant_pieces_raise_nothing() {
    let zeros = "blocks.1.ffn.0.bias";
    let folder = bent(|name, _, data| {
        if name == zeros || name == "blocks.1.ffn.2.weight" {
            data.fill(0);
        }
    });
    for (mesh, strategy) in [
        ("tp=2", Strategy::Ulysses),
        ("tp=2", Strategy::Megatron),
        ("tp=4", Strategy::Megatron),
        ("pp=2", Strategy::Ulysses),
        ("tp=2,pp=2", Strategy::Megatron),
        ("pp1 tp=2", Strategy::Megatron),
        ("pp1 tp=4", Strategy::Ulysses),
    ] {
        let plan = planned(mesh, strategy);
        let all = prints(&plan, |_| weights(&plan, folder.path()));
        assert_eq!(told(&all), None, "{mesh} {strategy:?}");
        if strategy == Strategy::Megatron {
            let bias: Vec<_> = all.values().flatten().filter(|p| p.tensor == zeros).collect();
            assert!(bias.len() >= 2 && bias.iter().all(|p| p.constant), "{bias:?}");
        }
        // Each piece is printed once by its rank, and every shard is known to two ranks.
        for prints in all.values() {
            let names: BTreeSet<_> = prints.iter().map(|p| (&p.tensor, &p.slice)).collect();
            assert_eq!(names.len(), prints.len(), "{mesh}");
        }
        let mut known: BTreeMap<_, usize> = BTreeMap::new();
        let weights = all.values().flatten().filter(|p| !p.tensor.starts_with('('));
        weights.for_each(|p| *known.entry((&p.tensor, &p.slice)).or_default() += 1);
        assert!(known.values().all(|n| *n >= 2), "{mesh}: {:?}", known.iter().find(|(_, n)| **n < 2));
    }
}

#[test]
fn tables_that_ranks_derive_are_printed_beside_their_weights() {
    let plan = planned("tp=2", Strategy::Ulysses);
    let all = prints(&plan, |_| weights(&plan, &demo()));
    for table in ["(rope table", "(time table", "(normal draws"] {
        assert!(all[&1].iter().any(|p| p.tensor.starts_with(table)), "{table}");
    }
    let mut other = all.clone();
    let rope = other.get_mut(&1).unwrap().iter_mut().find(|p| p.tensor.starts_with("(rope")).unwrap();
    rope.digest = Digest::of(b"another sine");
    let (rank, text) = told(&other).unwrap();
    assert!(rank == 1 && text.contains("`(rope table") && text.contains("different bytes"), "{text}");
}

/// Takes every rank for rank 0, as a loader does whose rank was never set.
struct AlwaysRank0(Weights, bool);

impl WeightSource for AlwaysRank0 {
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        seat: &Seat,
    ) -> Result<Vec<f32>, Diagnostic> {
        let rank = if self.1 { Rank(0) } else { seat.rank };
        self.0.read(name, ty, load, &Seat { rank, ..*seat })
    }
}

#[test]
fn a_loader_that_gives_every_rank_shard_0_is_found() {
    let plan = planned("tp=2", Strategy::Megatron);
    let (_, text) = told(&prints(&plan, |_| AlwaysRank0(weights(&plan, &demo()), true))).unwrap();
    let parts =
        ["equal bytes for different slices", "`blocks.0.", "dim 0 [0..64) of 128", "dim 0 [64..128) of 128"];
    for part in parts.into_iter().chain(["rank 0, 1", "more pieces"]) {
        assert!(text.contains(part), "{part} in {text}");
    }
    // On one rank alone: its shards are those of rank 0.
    let one = prints(&plan, |r| AlwaysRank0(weights(&plan, &demo()), r == Rank(1)));
    let (rank, text) = told(&one).unwrap();
    assert_eq!(rank, 1);
    for part in
        parts.into_iter().chain(["[0..64) of 128 on rank 0, 1 and", "[64..128) of 128 on rank 1, both"])
    {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn a_flipped_bit_in_one_ranks_file_is_found_whoever_else_holds_the_piece() {
    // In the last rows: of a shard that no other rank holds under megatron.
    let tensor = "blocks.2.self_attn.q.weight";
    let damaged = bent(|name, _, data| {
        if name == tensor {
            let at = data.len() * 3 / 4 + 2;
            data[at] ^= 1;
        }
    });
    for (strategy, slice) in [(Strategy::Ulysses, "whole"), (Strategy::Megatron, "dim 0 [64..128) of 128")] {
        let plan = planned("tp=2", strategy);
        let dir = |r| if r == Rank(1) { damaged.path().to_path_buf() } else { demo() };
        assert_eq!(
            weights(&plan, &dir(Rank(0))).digest(),
            weights(&plan, &dir(Rank(1))).digest(),
            "the sample sees it, which is not what is tested"
        );
        let (rank, text) = told(&prints(&plan, |r| weights(&plan, &dir(r)))).unwrap();
        for part in ["different bytes for one slice", tensor, slice, "on rank 0", "on rank 1"] {
            assert!(rank == 1 && text.contains(part), "{strategy:?}: {part} in {text}");
        }
        assert!(!text.contains("more pieces"), "{strategy:?}: {text}");
    }
}

/// An engine's weights without the programs around them.
fn held(plan: &Plan, rank: Rank) -> (Cpu, Shards) {
    let mut source = weights(plan, &demo());
    let seat = Seat { mesh: *plan.sealed.mesh(), rank };
    let mut cpu = Cpu::new(seat, Pool::single(), Vec::new(), Duration::from_secs(1));
    for phase in plan.sealed.phases().iter().filter(|p| !LEADER_PHASES.contains(&p.as_str())) {
        let (program, slots) = (plan.sealed.program(phase, rank), plan.sealed.slots(phase, rank));
        cpu.load(&Arc::new((**program.unwrap()).clone()), slots.unwrap(), &mut source).unwrap();
    }
    let mut shards = Shards::new(&plan.sealed, rank);
    shards.take(&cpu, &mut source).unwrap();
    (cpu, shards)
}

/// Looks until something is said.
fn until_said(cpu: &mut Cpu, shards: &mut Shards, call_ns: u64) -> (u64, Rehash) {
    (1..10_000).find_map(|call| shards.rehash(cpu, call_ns, 0).map(|said| (call, said))).unwrap()
}

#[test]
fn a_weight_changed_in_memory_is_found_within_a_round() {
    let plan = planned("tp=2", Strategy::Megatron);
    let call_ns = 5_000_000;
    for (tensor, index) in [("blocks.3.ffn.2.weight", 77), ("blocks.0.norm3.weight", 5)] {
        let (mut cpu, mut shards) = held(&plan, Rank(1));
        let (calls, said) = until_said(&mut cpu, &mut shards, call_ns);
        assert!(said.loaded == said.now && calls > 1, "{said:?} after {calls} calls");
        shards.rehash(&mut cpu, call_ns, 0);
        assert!(cpu.write_weight(tensor, index, 0.123));
        let (_, mut said) = until_said(&mut cpu, &mut shards, call_ns);
        if said.what == "all weights" {
            // It was passed in this round already.
            said = until_said(&mut cpu, &mut shards, call_ns).1;
        }
        assert!(said.loaded != said.now && said.what.contains(tensor), "{said:?}");
        assert!(said.what.contains(if tensor.contains("ffn.2") {
            "dim 1 [256..512) of 512"
        } else {
            "whole"
        }));
    }
}

#[test]
fn what_is_not_spent_is_kept_and_what_is_overspent_is_owed() {
    thread_local!(static READS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) });
    /// Every look at the weights takes as long, however little it is.
    const LOOK_NS: u64 = 20_000;
    let plan = planned("tp=1", Strategy::Ulysses);
    let (mut cpu, mut shards) = held(&plan, Rank(0));
    shards.clock = || READS.replace(READS.get() + 1) * LOOK_NS;
    let (mut allowed, mut rounds) = (0, 0);
    for call in 0..4000u64 {
        // A call in a hundred is long; in the others, other digests take more than there is.
        let (call_ns, digest_ns) = if call % 100 == 0 { (30_000_000, 100_000) } else { (120_000, 5000) };
        rounds += u32::from(shards.rehash(&mut cpu, call_ns, digest_ns).is_some());
        let share = call_ns / DIGEST_SHARE;
        allowed += share.saturating_sub(digest_ns).max(share / LEAST);
        let spent = READS.get() / 2 * LOOK_NS;
        assert!(spent <= allowed + LOOK_NS, "call {call}: {spent} ns of {allowed} ns");
    }
    assert!(rounds > 0 && READS.get() > 100, "{rounds} rounds in {} looks", READS.get() / 2);
}

#[test]
fn a_message_holds_the_prints_of_any_model() {
    let list = |blocks: usize, experts: usize, slice: &str, shard: u8| -> Vec<ShardPrint> {
        let name = |i: usize| format!("blocks.{}.ffn.experts.{}.gate_proj.weight", i / experts, i % experts);
        let print = |i: usize| ShardPrint {
            tensor: name(i),
            slice: slice.to_string(),
            digest: Digest::of(&[(i % 251) as u8, shard]),
            constant: false,
        };
        (0..blocks * experts).map(print).collect()
    };
    let (first, second) = ("dim 0 [0..1728) of 13824", "dim 0 [1728..3456) of 13824");
    // As many tensors as a model of 14 billion has: all are told one by one, for the rank and for its neighbour.
    let dense = fold(list(40, 28, first, 0), MAX_PRINT_BYTES / 2);
    assert!(dense.len() == 40 * 28 && size(&dense) * 2 < MAX_META_BYTES as usize / 2);
    // With a tensor per expert they are joined.
    let experts = |slice, shard| fold(list(60, 256, slice, shard), MAX_PRINT_BYTES / 2);
    let (a, b) = (experts(first, 0), experts(second, 1));
    assert!(a.len() == 60 && a[0].tensor == "blocks.0.ffn.experts.*", "{} {}", a.len(), a[0].tensor);
    let two = |a: &[ShardPrint], b: &[ShardPrint]| told(&BTreeMap::from([(0, a.to_vec()), (1, b.to_vec())]));
    assert_eq!(two(&a, &b), None);
    assert!(two(&a, &experts(second, 0)).unwrap().1.contains("equal bytes"));
    assert!(two(&a, &experts(first, 1)).unwrap().1.contains("different bytes"));
    assert_eq!(fold(list(60, 256, first, 0), 100).len(), 1);
}

/// Latents per chunk of a stream on several ranks. Before chunk `cut` the scene is cut; there the weights of `reload` are
/// taken, if any.
fn stream(plan: &Arc<Plan>, from: &Path, cut: u32, chunks: u32, reload: Option<&Path>) -> Vec<Vec<u8>> {
    let specs = comm::groups(&plan.sealed);
    let fds = comm::create(&specs).unwrap();
    let common = Common::new(Arc::clone(plan), crate::modelled::Modelled::default());
    let model = Model::under(from, plan).unwrap();
    let mut director = Director::new(common.stream.clone()).unwrap();
    let text =
        Codec::load(plan, model.words().unwrap(), None).unwrap().text("a red circle moves left").unwrap();
    let mut calls = Vec::new();
    for c in 0..chunks {
        let id = |calls: &[ReadyCall]| calls.len() as u64 + 1;
        if let Some(dir) = reload.filter(|_| c == cut) {
            let weights = preflight_reload(plan, from, dir).unwrap();
            let source = dir.display().to_string();
            let plan = director.control(CallAction::Reload).unwrap();
            calls.push(ReadyCall {
                call_id: id(&calls),
                action: plan.action,
                chunk: plan.chunk,
                cache_epoch: plan.cache_epoch,
                meta: None,
                reload: Some(Reload { source, weights }),
                inputs: Tensors::default(),
            });
        }
        let cut = if c == cut { Cut::Ordered } else { Cut::None };
        let asked = ChunkRequest { prompt_change: c == 0, seed: 7 + u64::from(c), cut };
        let call = director.next(&asked, &common.census).unwrap();
        let meta = call.meta.unwrap();
        let inputs = Tensors(if meta.reset_cross { vec![text.clone()] } else { Vec::new() });
        calls.push(ReadyCall {
            call_id: id(&calls),
            action: call.action,
            chunk: call.chunk,
            cache_epoch: call.cache_epoch,
            meta: Some(meta),
            reload: None,
            inputs,
        });
    }
    std::thread::scope(|scope| {
        let ranks: Vec<_> = plan
            .sealed
            .mesh()
            .iter()
            .map(|rank| {
                let mine = comm::of_rank(&specs, rank).map(|i| fds[i].try_clone().unwrap()).collect();
                let (common, calls) = (&common, &calls);
                scope.spawn(move || {
                    let ends = comm::attach(&plan.sealed, rank, mine).unwrap();
                    let seat = Seat { mesh: *plan.sealed.mesh(), rank };
                    let cpu = Cpu::new(seat, Pool::single(), ends, Duration::from_secs(60));
                    let in_use = weights(plan, from);
                    let mut engine = MeshEngine::load(&plan.sealed, rank, Box::new(cpu), &mut in_use.clone())
                        .unwrap()
                        .reloads(opener(Arc::clone(plan), in_use));
                    let mut cache = tessera_runtime::cache::Cache::new(common.stream.cache).unwrap();
                    let (mut out, mut spent) = (Vec::new(), (0, 0));
                    let armed = Tripwires::default();
                    for call in calls {
                        let report =
                            run_call(&mut engine, call, &common.census, &mut cache, &armed, &|_| {}).unwrap();
                        assert_eq!(report.fingerprints.is_empty(), call.reload.is_none());
                        if call.meta.is_some() {
                            spent.0 += report.observed.digest_ns;
                            spent.1 += report.observed.phase_ns.iter().sum::<u64>();
                            out.push(report.output.map(|t| t.data().to_vec()).unwrap_or_default());
                        }
                    }
                    println!("digests: {} µs of {} µs in phases", spent.0 / 1000, spent.1 / 1000);
                    (out, engine.fingerprints(), engine.cache_contents())
                })
            })
            .collect();
        let mut ranks: Vec<_> = ranks.into_iter().map(|r| r.join().unwrap()).collect();
        let prints = (0u32..).zip(ranks.iter().map(|r| r.1.clone())).collect();
        assert_eq!(told(&prints), None);
        // What several ranks cache by plan is equal to the bit, and shards of a cache are different.
        let caches: BTreeMap<u32, Vec<ShardPrint>> = (0..).zip(ranks.iter().map(|r| r.2.clone())).collect();
        assert_eq!(told(&caches), None);
        assert!(caches[&0].iter().any(|p| p.tensor.starts_with("kv.") && p.slice != "whole" && !p.constant));
        ranks.swap_remove(0).0
    })
}

#[test]
fn after_a_reload_a_stream_is_that_of_the_new_checkpoint() {
    let other = another();
    for (mesh, strategy) in [("tp=2", Strategy::Ulysses), ("tp=2", Strategy::Megatron)] {
        let plan = planned(mesh, strategy);
        let (cut, chunks) = (2, 4);
        let old = stream(&plan, &demo(), cut, chunks, None);
        let new = stream(&plan, other.path(), cut, chunks, None);
        let reloaded = stream(&plan, &demo(), cut, chunks, Some(other.path()));
        let cut = cut as usize;
        assert!(reloaded[..cut] == old[..cut], "{mesh} {strategy:?}: before the reload");
        assert!(reloaded[cut..] == new[cut..], "{mesh} {strategy:?}: after it");
        assert!((cut..old.len()).all(|c| old[c] != new[c]), "the checkpoints show the same");
    }
}

#[test]
fn a_reload_that_does_not_fit_is_refused_and_the_old_weights_stay() {
    let plan = planned("tp=2", Strategy::Megatron);
    let other = another();
    let wider = bent(|name, shape, data| {
        if name == "blocks.1.ffn.0.bias" {
            shape[0] += 1;
            data.extend([0; 2]);
        }
    });
    let in_use = weights(&plan, &demo());
    let mut engine = lone(&plan, Rank(0), &mut in_use.clone()).reloads(opener(Arc::clone(&plan), in_use));
    let before = engine.fingerprints();
    let asked = ReadyCall {
        call_id: 1,
        action: CallAction::Reload,
        chunk: 0,
        cache_epoch: 0,
        meta: None,
        reload: None,
        inputs: Tensors::default(),
    };
    let path = |dir: &TempDir| dir.path().display().to_string();

    let ds = preflight_reload(&plan, &demo(), wider.path()).unwrap_err();
    assert_eq!(ds[0].code.id, "T0506");
    for (source, code) in [(path(&wider), "T0506"), ("/nowhere".to_string(), "T0010")] {
        engine.begin(&asked);
        let fault = engine.reload(&source).unwrap_err();
        assert_eq!(fault.code, code, "{fault:?}");
    }
    assert_eq!(engine.fingerprints(), before);
    engine.begin(&ReadyCall { action: CallAction::Reset, ..asked.clone() });
    let fault = engine.reload(&path(&other)).unwrap_err();
    assert!(fault.code == "T0737" && fault.text.contains("outside of a RELOAD"), "{fault:?}");
    assert_eq!(engine.fingerprints(), before);

    engine.begin(&asked);
    let digest = preflight_reload(&plan, &demo(), other.path()).unwrap();
    let Reloaded { weights: found, fingerprints: after } = engine.reload(&path(&other)).unwrap();
    assert_eq!((found, &after), (digest, &engine.fingerprints()));
    assert_ne!(preflight_reload(&plan, &demo(), &demo()).unwrap(), digest);
    for (b, a) in before.iter().zip(&after) {
        assert_eq!((&b.tensor, &b.slice), (&a.tensor, &a.slice));
        assert_eq!(b.digest == a.digest, b.tensor.starts_with('(') || b.constant, "{}", b.tensor);
    }
}

#[test]
fn what_is_reloaded_is_watched_from_then_on() {
    let plan = planned("tp=2", Strategy::Megatron);
    let (other, (mut cpu, mut shards)) = (another(), held(&plan, Rank(1)));
    shards.rehash(&mut cpu, 5_000_000, 0);
    shards.opens(opener(Arc::clone(&plan), weights(&plan, &demo())));
    let before = until_said(&mut cpu, &mut shards, 5_000_000).1;
    shards.guard(false);
    shards.reload(&mut cpu, &other.path().display().to_string()).unwrap();
    let after = until_said(&mut cpu, &mut shards, 5_000_000).1;
    assert!(after.loaded == after.now && after.now != before.now, "{after:?}");
}

#[test]
#[ignore = "a measurement, for an optimised build"]
fn what_fingerprints_cost() {
    for (mesh, strategy) in
        [("tp=1", Strategy::Ulysses), ("tp=2", Strategy::Ulysses), ("tp=2", Strategy::Megatron)]
    {
        let plan = planned(mesh, strategy);
        let source = weights(&plan, &demo());
        let begun = Instant::now();
        let engine = lone(&plan, Rank(0), &mut source.clone());
        let load = begun.elapsed();
        let bytes = engine.memory()[0];
        let (mut shards, begun) = (Shards::new(&plan.sealed, Rank(0)), Instant::now());
        let (seat, next) = &shards.next;
        let mut witnessed = 0;
        for p in next {
            let mut hash = Hasher::default();
            hash.update(&source.clone().read(&p.tensor, &p.ty, p.load.as_deref(), seat).unwrap());
            witnessed += hash.finish("", "").bytes;
        }
        let witness = begun.elapsed();
        let (mut cpu, _) = held(&plan, Rank(0));
        let mut rounds: Vec<u64> = (0..9)
            .map(|_| {
                let begun = thread_ns();
                assert_eq!(cpu.audit(u64::MAX).rounds, 1);
                thread_ns() - begun
            })
            .collect();
        rounds.sort_unstable();
        shards.prints = engine.fingerprints();
        let caches = Instant::now();
        let contents = engine.cache_contents();
        println!(
            "{mesh} {strategy:?}: load {load:?}, {} prints, {bytes} bytes in one round of {} µs ({:.2} GB/s), neighbour's \
             {witnessed} bytes in {witness:?}, {} caches digested in {:?}; at 1/{DIGEST_SHARE} of a 60 ms call a round takes \
             {:.1} calls",
            shards.prints.len(),
            rounds[4] / 1000,
            bytes as f64 / rounds[4] as f64,
            contents.len(),
            caches.elapsed(),
            rounds[4] as f64 / (60e6 / DIGEST_SHARE as f64),
        );
    }
}
