//! A recorded run that a server continues: what it delivered, and what it generated that from.
//!
//! A record holds no caches. The ranks generate the recorded chunks again, which gives the same bits, and the server shows
//! those that follow. Each chunk that is generated again is compared with its recorded digest.

use std::path::Path;

use tessera::Plan;
use tessera::files::read_file;
use tessera::record::RECORD_FILE;
use tessera::stream_options::StreamOptions;
use tessera_base::Diagnostic;
use tessera_report::record::{ChunkRecord, RunRecord};

use crate::codes::T1611;
use crate::server_state::{Continuation, EndedRun, NewSetting, Settings};

/// Most bytes of a record: some 300,000 chunks of two ranks.
const MAX_RECORD_BYTES: u64 = 2 << 30;
/// Program that encodes a prompt; a chunk that ran it took a prompt, which may have been the old one again.
const TEXT_PHASE: &str = "text";

/// What a recorded run delivered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecordedSession {
    first: Settings,
    /// Prompt and seed of the last chunk, with which the session goes on.
    pub(crate) last: Settings,
    prompts_at: Vec<(u32, String)>,
    seeds_at: Vec<(u32, u64)>,
    cuts_at: Vec<u32>,
    /// Digests of the latents of each chunk.
    pub(crate) digests: Vec<String>,
    /// Prompt and seed from a chunk behind the recorded ones, in order.
    later: Vec<(u32, Settings)>,
}

impl RecordedSession {
    /// Reads the record in a run folder: so many chunks, or all. The session must have run this plan.
    ///
    /// # Errors
    /// T1611, or what is wrong with the record.
    pub(crate) fn read(
        folder: &Path,
        plan: &Plan,
        chunks: Option<u32>,
    ) -> Result<RecordedSession, Diagnostic> {
        let path = folder.join(RECORD_FILE);
        let refuse = |what: String| Diagnostic::error(&T1611, format!("{}: {what}", path.display()));
        let bytes = read_file(&path, MAX_RECORD_BYTES).map_err(|e| refuse(e.to_string()))?;
        let record = RunRecord::parse(&bytes)?;
        let digest = plan.sealed.digest_hex();
        if record.start.plan != digest {
            return Err(refuse("the session ran another plan".into())
                .with_label("recorded", record.start.plan.clone())
                .with_label("this server", digest)
                .with_hint(
                    "give the model and the mapping of the session, or --plan with its folder `plan`",
                ));
        }
        let recorded = chunks.map_or(Some(&*record.chunks), |chunks| record.chunks.get(..chunks as usize));
        recorded
            .and_then(RecordedSession::from_chunks)
            .ok_or_else(|| refuse("the session delivered no chunk, or the record lacks some".into()))
    }

    /// Returns the session of these chunks; `None` if there is none, or if they do not count from 0.
    fn from_chunks(chunks: &[ChunkRecord]) -> Option<RecordedSession> {
        if !chunks.iter().map(|chunk| chunk.chunk).eq(0..chunks.len() as u32) {
            return None;
        }
        let settings = |chunk: &ChunkRecord| Settings { prompt: chunk.prompt.clone(), seed: chunk.seed };
        let later = || chunks.iter().zip(chunks.iter().skip(1));
        let takes_prompt = |before: &ChunkRecord, chunk: &ChunkRecord| {
            let encodes = chunk.ranks.iter().flat_map(|rank| &rank.phases).any(|p| p.name == TEXT_PHASE);
            // The first chunk of a scene encodes its prompt in any case.
            before.prompt != chunk.prompt || (encodes && !chunk.cut)
        };
        Some(RecordedSession {
            first: settings(chunks.first()?),
            last: settings(chunks.last()?),
            prompts_at: later()
                .filter(|(before, chunk)| takes_prompt(before, chunk))
                .map(|(_, chunk)| (chunk.chunk, chunk.prompt.clone()))
                .collect(),
            seeds_at: later()
                .filter(|(before, chunk)| before.seed != chunk.seed)
                .map(|(_, chunk)| (chunk.chunk, chunk.seed))
                .collect(),
            // A flush discarded requests that never became chunks, so that it is a cut now.
            cuts_at: later().filter(|(_, chunk)| chunk.cut).map(|(_, chunk)| chunk.chunk).collect(),
            digests: chunks.iter().map(|chunk| chunk.latents_digest.clone()).collect(),
            later: Vec::new(),
        })
    }

    /// Returns the number of recorded chunks: the first one that the server shows.
    pub(crate) fn chunks(&self) -> u32 {
        self.digests.len() as u32
    }

    /// Adds what the leader had changed with requests that were not delivered, at the chunks that they would have become.
    pub(crate) fn add_changes(&mut self, ended: EndedRun) {
        let EndedRun { next_request, undelivered, .. } = ended;
        let is_flush = |(_, setting): &&(u64, NewSetting)| *setting == NewSetting::FlushedScene;
        // A flush has discarded the requests before it, so that its own becomes the next chunk.
        let next = undelivered.iter().rfind(is_flush).map_or(next_request, |(request, _)| *request);
        let mut settings = self.last.clone();
        for (request, setting) in undelivered {
            let behind = u32::try_from(request.saturating_sub(next)).unwrap_or(u32::MAX);
            let chunk = self.chunks().saturating_add(behind);
            match setting {
                NewSetting::Prompt(prompt) => {
                    self.prompts_at.push((chunk, prompt.clone()));
                    settings.prompt = prompt;
                }
                NewSetting::Seed(seed) => {
                    self.seeds_at.push((chunk, seed));
                    settings.seed = seed;
                }
                NewSetting::Scene | NewSetting::FlushedScene => self.cuts_at.push(chunk),
            }
            self.later.push((chunk, settings.clone()));
        }
    }

    /// Returns how a run continues the session.
    pub(crate) fn to_continuation(&self) -> Continuation {
        let later = self.later.iter().map(|(chunk, settings)| (u64::from(*chunk), settings.clone()));
        let settings = std::iter::once((0, self.last.clone())).chain(later).collect();
        Continuation { unshown: self.chunks(), settings }
    }

    /// Lets a run generate the recorded chunks first.
    pub(crate) fn apply_to(&self, options: &mut StreamOptions) {
        options.prompt.clone_from(&self.first.prompt);
        options.seed = self.first.seed;
        options.prompts_at.clone_from(&self.prompts_at);
        options.seeds_at.clone_from(&self.seeds_at);
        options.cuts_at.clone_from(&self.cuts_at);
    }

    /// Returns why a session cannot go on whose chunk is not the recorded one.
    pub(crate) fn differs(&self, chunk: u32) -> Diagnostic {
        Diagnostic::error(&T1611, format!("chunk {chunk} is not the recorded one")).with_hint(
            "use the weights, the build and the kind of machine of the session; its record names them",
        )
    }
}

#[cfg(test)]
mod tests {
    use tessera_report::record::{PhaseRecord, RankChunk};

    use super::*;

    fn chunk(number: u32, prompt: &str, seed: u64, cut: bool, phase: &str) -> ChunkRecord {
        let phase = PhaseRecord {
            name: phase.into(),
            stream: "compute".into(),
            start_ns: 0,
            end_ns: 1,
            collectives: 0,
            classes: Vec::new(),
            waits: None,
        };
        let rank = RankChunk {
            rank: 0,
            phases: vec![phase],
            state_digest: String::new(),
            trace_digest: String::new(),
            memory: None,
        };
        ChunkRecord {
            chunk: number,
            request: Some(u64::from(number) + 2),
            call_id: 1,
            cache_epoch: 0,
            start_frame: 0,
            prompt: prompt.into(),
            seed,
            cut,
            evicted_frames: 0,
            latents_digest: format!("digest {number}"),
            decoder_psnr_db: None,
            frames: 12,
            start_ns: 0,
            wall_ns: 0,
            queue_in: 0,
            queue_out: 0,
            ranks: vec![rank],
            pipeline: None,
        }
    }

    #[test]
    fn changes_are_read_from_the_chunks() {
        let chunks = [
            chunk(0, "a", 1, false, "text"),
            chunk(1, "a", 1, false, "denoise"),
            chunk(2, "b", 1, false, "text"),
            chunk(3, "b", 2, false, "text"),
            chunk(4, "b", 2, true, "text"),
        ];
        let session = RecordedSession::from_chunks(&chunks).unwrap();
        let mut options = StreamOptions { prompt: "other".into(), ..StreamOptions::default() };
        session.apply_to(&mut options);
        assert_eq!((options.prompt.as_str(), options.seed), ("a", 1));
        // Chunk 3 took the same prompt again, and chunk 4 opened a scene.
        assert_eq!(options.prompts_at, [(2, "b".to_string()), (3, "b".to_string())]);
        assert_eq!((options.seeds_at, options.cuts_at), (vec![(3, 2)], vec![4]));
        assert_eq!((session.chunks(), session.last.prompt.as_str(), session.last.seed), (5, "b", 2));
        assert_eq!(RecordedSession::from_chunks(&chunks[1..]), None);
        assert_eq!(RecordedSession::from_chunks(&[]), None);
    }

    #[test]
    fn changes_of_requests_that_were_not_delivered_hold_from_the_chunks_that_those_would_have_become() {
        let settings = |prompt: &str, seed| Settings { prompt: prompt.into(), seed };
        let recorded = [chunk(0, "a", 1, false, "text"), chunk(1, "a", 1, false, "denoise")];
        let continue_with = |undelivered: Vec<(u64, NewSetting)>| {
            let mut session = RecordedSession::from_chunks(&recorded).unwrap();
            session.add_changes(EndedRun { chunks: 2, next_request: 7, undelivered });
            session
        };
        // Requests 7 and 9 would have become chunks 2 and 4.
        let session = continue_with(vec![
            (7, NewSetting::Prompt("b".into())),
            (9, NewSetting::Seed(4)),
            (9, NewSetting::Scene),
        ]);
        assert_eq!((session.chunks(), &session.prompts_at), (2, &vec![(2, "b".to_string())]));
        assert_eq!((&session.seeds_at, &session.cuts_at), (&vec![(4, 4)], &vec![4]));
        let of_requests = session.to_continuation().settings;
        let expected =
            [(0, settings("a", 1)), (2, settings("b", 1)), (4, settings("b", 4)), (4, settings("b", 4))];
        assert_eq!(of_requests, expected);
        // Request 9 flushes, so that 7 and 8 become no chunk, and the prompt holds all the same.
        let session = continue_with(vec![
            (8, NewSetting::Prompt("b".into())),
            (9, NewSetting::FlushedScene),
            (10, NewSetting::Seed(4)),
        ]);
        assert_eq!((&session.prompts_at, &session.cuts_at), (&vec![(2, "b".to_string())], &vec![2]));
        assert_eq!(session.seeds_at, [(3, 4)]);
    }
}
