//! Finds changes of a rank's caches that neither a call nor an announced reset made: KV caches, the frames
//! and rows that the convolutions of a VAE read again, and every other buffer that survives a call.
//!
//! After a call the rank digests the buffers that the call wrote, and before the next call all of them. A
//! buffer that a call did not write keeps its older digest, so a write that the program does not contain is
//! found as well. The digest is of this rank alone: no other rank holds the same rows. A backend that
//! digests no buffers still counts its resets.
//!
//! In the recompute regime each call writes the KV caches before it reads them, so what they held before is
//! of no use, and the rank reads them for no digest.

use std::collections::{BTreeMap, BTreeSet};

use tessera_device::Backend;
use tessera_runtime::engine::{CacheFault, ReadyCall};
use tessera_runtime::wire::CallAction;

/// Names in a message; the others are counted.
const NAMED_BUFFERS: usize = 3;

/// What a rank remembers of its buffers from one call to the next.
#[derive(Debug, Default)]
pub(crate) struct CacheAudit {
    /// The part of every buffer that this rank holds, such as `dim 0 [24..48) of 96`, by buffer name.
    slices: BTreeMap<String, String>,
    /// Buffers that every call writes before it reads them.
    rebuilt: BTreeSet<String>,
    /// Digest of every buffer when it was last written.
    digests: BTreeMap<String, u64>,
    /// Buffers that were written since.
    written: BTreeSet<String>,
    scene: Scene,
    /// Resets of the backend that this rank knows of.
    known_resets: u64,
    /// Id of the last call that ended.
    last_call: u64,
}

/// The scene whose history the buffers hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Scene {
    /// Epoch in which the buffers were last emptied.
    epoch: u32,
    /// Chunks that were computed since.
    chunks: u32,
}

impl CacheAudit {
    /// Begins an audit of the buffers of `slices`, of which every call writes those of `rebuilt` before it
    /// reads them.
    pub(crate) fn new(slices: BTreeMap<String, String>, rebuilt: BTreeSet<String>) -> CacheAudit {
        let written = slices.keys().cloned().collect();
        CacheAudit { slices, rebuilt, written, ..CacheAudit::default() }
    }

    /// Returns the part of every buffer that this rank holds, by buffer name.
    pub(crate) fn slices(&self) -> &BTreeMap<String, String> {
        &self.slices
    }

    /// Notes that a phase wrote these buffers.
    pub(crate) fn note_written(&mut self, buffers: &BTreeSet<String>) {
        self.written.extend(buffers.iter().cloned());
    }

    /// Notes that the runtime emptied the buffers for an epoch.
    pub(crate) fn note_reset(&mut self, backend: &dyn Backend, epoch: u32) {
        self.scene = Scene { epoch, chunks: 0 };
        self.known_resets = backend.reset_count();
        self.written.extend(self.slices.keys().cloned());
    }

    /// Remembers the buffers at the end of a call.
    pub(crate) fn end_call(&mut self, backend: &mut dyn Backend, call: &ReadyCall) {
        let written = std::mem::take(&mut self.written);
        let kept: Vec<&str> = written.difference(&self.rebuilt).map(String::as_str).collect();
        if let Some(digests) = backend.digest_buffers(&kept) {
            self.digests.extend(kept.iter().map(ToString::to_string).zip(digests));
        }
        self.scene.chunks += u32::from(call.action == CallAction::Infer);
        self.last_call = call.call_id;
    }

    /// Compares the buffers with those at the end of the last call, and their history with the scene that
    /// `call` continues.
    pub(crate) fn find_faults(&mut self, backend: &mut dyn Backend, call: &ReadyCall) -> Vec<CacheFault> {
        let lost = self.find_lost_scene(backend, call).map(CacheFault::Lost);
        let changed = self.find_changes(backend, call).map(CacheFault::Changed);
        lost.into_iter().chain(changed).collect()
    }

    fn find_lost_scene(&mut self, backend: &dyn Backend, call: &ReadyCall) -> Option<String> {
        let meta = call.meta.as_ref().filter(|m| call.action == CallAction::Infer && !m.resets_caches())?;
        let Scene { epoch, chunks } = self.scene;
        let known = std::mem::replace(&mut self.known_resets, backend.reset_count());
        let (id, chunk, frame, sent) = (call.call_id, call.chunk, meta.start_frame(), call.cache_epoch);
        if epoch != sent {
            return Some(format!(
                "call {id}, chunk {chunk}: the envelope continues epoch {sent}, but the caches of this rank were last \
                 emptied in epoch {epoch}"
            ));
        }
        // Nothing is lost before the first chunk of a scene.
        (self.known_resets != known && chunks > 0).then(|| {
            format!(
                "call {id}, chunk {chunk}: the envelope continues epoch {epoch} at frame {frame} after {chunks} chunks, but \
                 the caches of this rank were emptied after call {} without a cut, a RESET or a RELOAD, and hold 0 chunks",
                self.last_call
            )
        })
    }

    fn find_changes(&self, backend: &mut dyn Backend, call: &ReadyCall) -> Option<String> {
        let names: Vec<&str> = self.digests.keys().map(String::as_str).collect();
        let now = backend.digest_buffers(&names)?;
        let changes: Vec<String> = (self.digests.iter().zip(now))
            .filter_map(|((name, then), now)| {
                let slice = self.slices.get(name).map_or("", String::as_str);
                (now != *then).then(|| format!("`{name}` {slice}: digest {then:016x} then, {now:016x} now"))
            })
            .collect();
        let more = changes.len().checked_sub(NAMED_BUFFERS).filter(|n| *n > 0);
        let more = more.map_or(String::new(), |n| format!("; and {n} more"));
        let (all, listed) =
            (self.digests.len(), changes.iter().take(NAMED_BUFFERS).cloned().collect::<Vec<_>>());
        (!changes.is_empty()).then(|| {
            format!(
                "call {}, chunk {}: {} of {all} caches of this rank changed after call {}, though no call and no reset wrote \
                 them: {}{more}. The chunk was not computed; start the stream again, or test this host's memory if it recurs",
                call.call_id,
                call.chunk,
                changes.len(),
                self.last_call,
                listed.join("; ")
            )
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tessera_base::Diagnostic;
    use tessera_cpu::{CpuBackend, Pool};
    use tessera_device::{CallData, MeshRank, NoObserver, ProgramHandle, WeightSource};
    use tessera_ir::{Slots, Type, parse_all};
    use tessera_mesh::{Mesh, Rank};
    use tessera_runtime::Digest;
    use tessera_runtime::wire::{CallMeta, CallWork, ChunkWork, F32Bits, Tensors};

    use super::*;

    /// Writes rows 1 and 2 of `kv`, and reads `vae.conv`.
    const PROGRAM: &str = "program @p {\n  buffer @kv : f32[5, 3]\n  buffer @vae.conv : f32[2, 3]\n  %x = input : f32[2, 3]\n  \
                           cache.write @kv, %x {first_row = 1}\n}";

    struct Rig {
        cpu: CpuBackend,
        program: ProgramHandle,
        audit: CacheAudit,
    }

    impl Rig {
        fn new() -> Rig {
            let seat = MeshRank { mesh: Mesh::default(), rank: Rank(0) };
            let mut cpu = CpuBackend::new(seat, Pool::single_thread(), Vec::new(), Duration::from_secs(1));
            let p = parse_all(PROGRAM, "p").unwrap_or_else(|d| panic!("{d:#?}")).remove(0);
            let slots = Slots { slot_bytes: Vec::new(), value_slots: vec![None; p.values.len()] };
            let program = cpu.load(&Arc::new(p), &slots, &mut NoWeights).unwrap_or_else(|d| panic!("{d:#?}"));
            let slices = ["kv", "vae.conv"].map(|name| (name.to_string(), "whole".to_string()));
            let mut rig = Rig { cpu, program, audit: CacheAudit::new(slices.into(), BTreeSet::new()) };
            rig.cpu.reset_buffers();
            rig.audit.note_reset(&rig.cpu, 0);
            rig.audit.end_call(&mut rig.cpu, &call(1, 0, CallAction::Warmup, false));
            rig
        }

        /// Runs a call that writes `kv`, and returns what the rank finds before it.
        fn run(&mut self, call: &ReadyCall) -> Vec<CacheFault> {
            let found = self.audit.find_faults(&mut self.cpu, call);
            if call.meta.as_ref().is_some_and(CallMeta::resets_caches) {
                self.cpu.reset_buffers();
                self.audit.note_reset(&self.cpu, call.cache_epoch);
            }
            let x = [call.call_id as f32; 6];
            let data = CallData { inputs: BTreeMap::from([("x", &x[..])]), ..CallData::default() };
            self.cpu.run(self.program, &data, &mut NoObserver).unwrap();
            self.audit.note_written(&BTreeSet::from(["kv".to_string()]));
            self.audit.end_call(&mut self.cpu, call);
            found
        }

        fn flip(&mut self, name: &str, at: usize, bit: u32) {
            let mut values = self.cpu.read_buffer(name).unwrap();
            values[at] = f32::from_bits(values[at].to_bits() ^ 1 << bit);
            assert!(self.cpu.write_buffer(name, &values));
        }
    }

    fn call(call_id: u64, cache_epoch: u32, action: CallAction, reset_kv: bool) -> ReadyCall {
        let meta = CallMeta {
            expected_generator_calls: 0,
            expected_collectives: 0,
            expected_trace_digest: Digest::default(),
            phases: Vec::new(),
            predicted_state: Digest::default(),
            work: CallWork::Chunk(ChunkWork {
                step_list: 0,
                n_steps: 0,
                reset_kv,
                reset_cross: false,
                recompute: false,
                start_frame: 0,
                seed: 0,
                prompt_epoch: 0,
                kv_bias: F32Bits::new(1.0),
            }),
        };
        let chunk = call_id.saturating_sub(2) as u32;
        let meta = Some(meta);
        ReadyCall { call_id, action, chunk, cache_epoch, meta, reload: None, inputs: Tensors::default() }
    }

    fn chunk_call(call_id: u64) -> ReadyCall {
        call(call_id, 0, CallAction::Infer, false)
    }

    // proves: K-15
    #[test]
    fn every_flipped_bit_of_a_cache_is_found_before_the_next_call() {
        let mut rig = Rig::new();
        assert_eq!(rig.run(&chunk_call(2)), []);
        for (name, elements) in [("kv", 15), ("vae.conv", 6)] {
            for (at, bit) in (0..elements).flat_map(|at| (0..32).map(move |bit| (at, bit))) {
                rig.flip(name, at, bit);
                let found = rig.audit.find_faults(&mut rig.cpu, &chunk_call(3));
                let [CacheFault::Changed(text)] = &found[..] else { panic!("{name} {at} {bit}: {found:?}") };
                assert!(text.starts_with("call 3, chunk 1: 1 of 2 caches"), "{text}");
                assert!(text.contains(&format!("`{name}` whole: digest ")), "{text}");
                rig.flip(name, at, bit);
            }
        }
        assert_eq!(rig.run(&chunk_call(3)), [], "an intact cache, and what the call wrote");
        assert_eq!(rig.run(&chunk_call(4)), []);
    }

    #[test]
    fn a_write_that_no_program_contains_is_found_after_the_call_in_which_it_happened() {
        let mut rig = Rig::new();
        rig.run(&chunk_call(2));
        rig.flip("vae.conv", 0, 3);
        // The call does not write the buffer, so the rank keeps its digest from before the call.
        rig.audit.note_written(&BTreeSet::from(["kv".to_string()]));
        rig.audit.end_call(&mut rig.cpu, &chunk_call(3));
        assert!(
            matches!(&rig.run(&chunk_call(4))[..], [CacheFault::Changed(text)] if text.contains("vae.conv"))
        );
    }

    // proves: K-15
    #[test]
    fn a_cache_that_every_call_rebuilds_is_not_compared() {
        let mut rig = Rig::new();
        rig.audit = CacheAudit::new(rig.audit.slices.clone(), BTreeSet::from(["kv".to_string()]));
        rig.audit.end_call(&mut rig.cpu, &call(1, 0, CallAction::Warmup, false));
        rig.flip("kv", 3, 5);
        assert_eq!(rig.run(&chunk_call(2)), []);
        rig.flip("vae.conv", 3, 5);
        let found = rig.audit.find_faults(&mut rig.cpu, &chunk_call(3));
        let [CacheFault::Changed(text)] = &found[..] else { panic!("{found:?}") };
        assert!(text.contains("1 of 1 caches") && text.contains("`vae.conv`"), "{text}");
    }

    // proves: K-16
    #[test]
    fn caches_that_were_emptied_within_a_scene_are_found_and_an_announced_reset_is_not() {
        let mut rig = Rig::new();
        rig.cpu.reset_buffers();
        assert_eq!(rig.run(&chunk_call(2)), [], "nothing is lost before the first chunk");
        assert_eq!(rig.run(&chunk_call(3)), []);
        rig.cpu.reset_buffers();
        let found = rig.audit.find_faults(&mut rig.cpu, &chunk_call(4));
        let [CacheFault::Lost(lost), CacheFault::Changed(_)] = &found[..] else { panic!("{found:?}") };
        assert!(lost.contains("call 4, chunk 2") && lost.contains("after 2 chunks"), "{lost}");

        let mut rig = Rig::new();
        rig.run(&chunk_call(2));
        assert_eq!(rig.run(&call(3, 1, CallAction::Infer, true)), [], "a cut");
        assert_eq!(rig.run(&call(4, 1, CallAction::Infer, false)), []);
        let found = rig.audit.find_faults(&mut rig.cpu, &call(5, 2, CallAction::Infer, false));
        assert!(
            matches!(&found[..], [CacheFault::Lost(text)] if text.contains("last emptied in epoch 1")),
            "{found:?}"
        );
    }

    /// The program reads no weights.
    struct NoWeights;

    impl WeightSource for NoWeights {
        fn read(
            &mut self,
            name: &str,
            _: &Type,
            _: Option<&str>,
            _: &MeshRank,
        ) -> Result<Vec<f32>, Diagnostic> {
            panic!("{name} is no weight of the program")
        }
    }
}
