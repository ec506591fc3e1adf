//! Echoes: bare messages with the sizes of a call's messages, exchanged between two calls. They
//! measure what the links alone cost.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use tessera_runtime::director::{ChunkRequest, Director};
use tessera_runtime::driver::StreamRequest;
use tessera_runtime::wire::{
    Commit, Envelope, EnvelopeHeader, Message, Ready, Tensors, WIRE_VERSION, encode,
};

use super::HarnessConfig;
use super::scripted_engine::EngineScript;
use super::synthetic_stream::{leader_config, plan_digest, stream_spec};
use super::timestamps::{TimestampSink, now_ns};
use crate::diagnostics_error;

/// Issues one request after each finished call, with an echo in between.
pub(super) struct EchoingRequests {
    next: u32,
    chunks: u32,
    calls: Receiver<()>,
    echo: Vec<UnixStream>,
    sizes: FrameSizes,
    script: EngineScript,
    timestamps: Arc<TimestampSink>,
}

impl Iterator for EchoingRequests {
    type Item = StreamRequest;

    fn next(&mut self) -> Option<StreamRequest> {
        if self.next > 0 {
            self.calls.recv().ok()?;
        }
        let last = self.next == self.chunks;
        let echo = (!self.echo.is_empty()).then(|| self.exchange_echo(last));
        if last {
            return None;
        }
        let prompt = (self.next == 0).then(|| "nothing".to_string());
        self.next += 1;
        let asked = now_ns();
        self.timestamps.with_timestamps(|s| {
            s.echo_sent.extend(echo.flatten());
            s.requested.push(asked);
        });
        Some(StreamRequest { prompt, ..StreamRequest::default() })
    }
}

impl EchoingRequests {
    /// Creates the requests of a run. `calls` receives an item for each finished call.
    pub(super) fn new(
        harness: &HarnessConfig,
        calls: Receiver<()>,
        echo: Vec<UnixStream>,
        stamps: &Arc<TimestampSink>,
    ) -> anyhow::Result<EchoingRequests> {
        Ok(EchoingRequests {
            next: 0,
            chunks: harness.chunks,
            calls,
            echo,
            sizes: FrameSizes::from_config(harness)?,
            script: harness.engine_script,
            timestamps: Arc::clone(stamps),
        })
    }

    /// Exchanges bare messages with the sizes of a call's messages, including the computation, and
    /// returns the start time.
    fn exchange_echo(&mut self, last: bool) -> Option<u64> {
        let mut envelope = vec![0; self.sizes.envelope];
        envelope[0] = u8::from(last);
        let mut ready = vec![0; self.sizes.ready];
        let commit = vec![0; self.sizes.commit];
        let sent = now_ns();
        for stream in &mut self.echo {
            stream.write_all(&envelope).ok()?;
        }
        for stream in &mut self.echo {
            stream.read_exact(&mut ready).ok()?;
        }
        for stream in &mut self.echo {
            stream.write_all(&commit).ok()?;
        }
        self.script.compute_only();
        let mut done = vec![0; self.sizes.ready];
        for stream in &mut self.echo {
            stream.read_exact(&mut done).ok()?;
        }
        Some(sent)
    }
}

/// Answers the leader's echoes on another rank and stores the time at which it read each commit.
/// Ends after the last echo, or when the socket closes.
pub(super) fn answer_echoes(
    mut stream: UnixStream,
    sizes: &FrameSizes,
    does: EngineScript,
    stamps: &TimestampSink,
) {
    let (mut envelope, mut commit) = (vec![0; sizes.envelope], vec![0; sizes.commit]);
    let ready = vec![0; sizes.ready];
    let mut read = Vec::new();
    loop {
        let whole = stream.read_exact(&mut envelope).and_then(|()| stream.write_all(&ready));
        if whole.and_then(|()| stream.read_exact(&mut commit)).is_err() {
            return;
        }
        read.push(now_ns());
        does.compute_only();
        if stream.write_all(&ready).is_err() {
            return;
        }
        if envelope[0] == 1 {
            return stamps.with_timestamps(|s| s.echo_read = read);
        }
    }
}

/// Sizes of the frames of a call in bytes.
#[derive(Debug, Clone, Copy)]
pub struct FrameSizes {
    /// Envelope of a chunk without a prompt, which carries no tensors.
    pub envelope: usize,
    /// A rank's answer that it is ready, with digests of its predicted state and its inputs.
    pub ready: usize,
    /// The leader's commit, which carries only the call id.
    pub commit: usize,
}

impl FrameSizes {
    /// Encodes the frames of a chunk without a prompt and returns their sizes.
    pub fn from_config(harness: &HarnessConfig) -> anyhow::Result<FrameSizes> {
        let config = leader_config(harness);
        let mut director = Director::new(stream_spec()).map_err(diagnostics_error)?;
        let mut next = |prompt_change| {
            director
                .plan_chunk(&ChunkRequest { prompt_change, ..ChunkRequest::default() }, &config.programs)
                .map_err(diagnostics_error)
        };
        next(true)?;
        let plan = next(false)?;
        let envelope = Envelope {
            header: EnvelopeHeader {
                version: WIRE_VERSION,
                action: plan.action,
                plan: config.plan,
                session: u64::MAX,
                call_id: 1000,
                chunk: plan.chunk,
                cache_epoch: plan.cache_epoch,
                deadline_ms: 5000,
            },
            meta: plan.meta,
            reload: None,
            tensors: Tensors::default(),
        };
        let ready = Ready { call_id: 1000, predicted_state: plan_digest(), inputs: plan_digest() };
        let bytes = |m: &Message| encode(0, m).map(|f| f.len()).map_err(|d| diagnostics_error(vec![d]));
        Ok(FrameSizes {
            envelope: bytes(&Message::Envelope(Box::new(envelope)))?,
            ready: bytes(&Message::Ready(ready))?,
            commit: bytes(&Message::Commit(Commit { call_id: 1000 }))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_have_the_sizes_of_a_call() {
        let orders = HarnessConfig { ranks: 8, chunks: 1, echo: true, ..HarnessConfig::default() };
        let s = FrameSizes::from_config(&orders).expect("a valid stream");
        assert!(s.envelope > 200 && s.envelope < 4096 && s.ready > s.commit && s.commit > 24, "{s:?}");
    }
}
