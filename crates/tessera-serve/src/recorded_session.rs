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
use crate::server_state::{Continuation, EndedRun};
use crate::settings::{NewSetting, Settings};

/// Most bytes of a record: some 300,000 chunks of two ranks.
const MAX_RECORD_BYTES: u64 = 2 << 30;
/// Program that encodes a prompt; a chunk that ran it took a prompt, which may have been the old one again.
const TEXT_PHASE: &str = "text";

/// What a recorded run delivered.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RecordedSession {
    first: Settings,
    /// Settings of the last chunk, with which the session goes on.
    pub(crate) last: Settings,
    /// Changes with the chunks from which they hold, in order. Those behind the recorded chunks hold when the session goes on.
    changes: Vec<(u32, NewSetting)>,
    /// Digests of the latents of each chunk.
    pub(crate) digests: Vec<String>,
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
        let pairs = chunks.iter().zip(chunks.iter().skip(1));
        let changes = pairs.flat_map(|(before, chunk)| {
            let changes = changes_between(before, chunk);
            changes.into_iter().map(|change| (chunk.chunk, change))
        });
        Some(RecordedSession {
            first: Settings::from_record(chunks.first()?),
            last: Settings::from_record(chunks.last()?),
            changes: changes.collect(),
            digests: chunks.iter().map(|chunk| chunk.latents_digest.clone()).collect(),
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
        for (request, setting) in undelivered {
            let behind = u32::try_from(request.saturating_sub(next)).unwrap_or(u32::MAX);
            self.changes.push((self.chunks().saturating_add(behind), setting));
        }
    }

    /// Returns how a run continues the session.
    pub(crate) fn to_continuation(&self) -> Continuation {
        let unshown = self.chunks();
        let mut current = self.last.clone();
        let mut settings = vec![(0, current.clone())];
        for (chunk, change) in self.changes.iter().filter(|(chunk, _)| *chunk >= unshown) {
            current.apply(change);
            settings.push((u64::from(*chunk), current.clone()));
        }
        Continuation { unshown, settings }
    }

    /// Lets a run generate the recorded chunks first.
    pub(crate) fn apply_to(&self, options: &mut StreamOptions) {
        self.first.schedule_first(options);
        self.changes.iter().for_each(|(chunk, change)| change.schedule(*chunk, options));
    }

    /// Returns why a session cannot go on whose chunk is not the recorded one.
    pub(crate) fn differs(&self, chunk: u32) -> Diagnostic {
        Diagnostic::error(&T1611, format!("chunk {chunk} is not the recorded one")).with_hint(
            "use the weights, the build and the kind of machine of the session; its record names them",
        )
    }
}

/// Returns the changes that took effect with a chunk.
fn changes_between(before: &ChunkRecord, chunk: &ChunkRecord) -> Vec<NewSetting> {
    let encodes = chunk.ranks.iter().flat_map(|rank| &rank.phases).any(|p| p.name == TEXT_PHASE);
    // The first chunk of a scene encodes its prompt in any case.
    let takes_prompt = before.prompt != chunk.prompt || (encodes && !chunk.cut);
    let settings = Settings::from_record(chunk);
    let takes_steps = before.step_list != chunk.step_list;
    let weights = settings.weights.filter(|_| before.weights != chunk.weights);
    // New weights open a scene by themselves. A flush discarded requests that never became chunks, so that it is a cut now.
    let cuts = chunk.cut && weights.is_none();
    let changes = [
        takes_prompt.then_some(NewSetting::Prompt(settings.prompt)),
        (before.seed != chunk.seed).then_some(NewSetting::Seed(chunk.seed)),
        takes_steps.then_some(NewSetting::Steps(settings.steps)),
        settings.bias.filter(|_| before.bias != chunk.bias).map(NewSetting::Bias),
        weights.map(NewSetting::Weights),
        cuts.then_some(NewSetting::Scene),
    ];
    changes.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use tessera::WeightChange;
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
            step_list: None,
            bias: None,
            weights: None,
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
        let styled = ChunkRecord {
            step_list: Some("fast".into()),
            bias: Some(0.5),
            weights: Some("lora:[]".into()),
            ..chunk(5, "b", 2, true, "text")
        };
        let plain = ChunkRecord { weights: Some("lora:[]".into()), ..chunk(6, "b", 2, false, "denoise") };
        let session =
            RecordedSession::from_chunks(&[&chunks[..], &[styled.clone(), plain]].concat()).unwrap();
        let mut options = StreamOptions::default();
        session.apply_to(&mut options);
        assert_eq!(options.step_lists_at, [(5, "fast".to_string()), (6, "default".to_string())]);
        // The weights of chunk 5 open its scene.
        assert_eq!((options.biases_at, options.cuts_at), (vec![(5, 0.5)], vec![4]));
        assert_eq!(options.weights_at, [(5, WeightChange::Loras(Vec::new()))]);
        let begun = RecordedSession::from_chunks(&[ChunkRecord { chunk: 0, ..styled }]).unwrap();
        let mut options = StreamOptions::default();
        begun.apply_to(&mut options);
        assert_eq!((options.step_lists_at, options.biases_at), (vec![(0, "fast".into())], vec![(0, 0.5)]));
        assert_eq!(options.weights_at, [(0, WeightChange::Loras(Vec::new()))]);
        assert_eq!(RecordedSession::from_chunks(&[]), None);
    }

    #[test]
    fn changes_of_requests_that_were_not_delivered_hold_from_the_chunks_that_those_would_have_become() {
        let options =
            |prompt: &str, seed| StreamOptions { prompt: prompt.into(), seed, ..StreamOptions::default() };
        let settings = |prompt: &str, seed| Settings::from_options(&options(prompt, seed));
        let recorded = [chunk(0, "a", 1, false, "text"), chunk(1, "a", 1, false, "denoise")];
        let continue_with = |undelivered: Vec<(u64, NewSetting)>| {
            let mut session = RecordedSession::from_chunks(&recorded).unwrap();
            session.add_changes(EndedRun { chunks: 2, next_request: 7, undelivered });
            session
        };
        // Requests 7 and 9 would have become chunks 2 and 4.
        let (prompt, seed) = (NewSetting::Prompt("b".into()), NewSetting::Seed(4));
        let session = continue_with(vec![(7, prompt.clone()), (9, seed.clone()), (9, NewSetting::Scene)]);
        assert_eq!(session.chunks(), 2);
        assert_eq!(session.changes, [(2, prompt.clone()), (4, seed.clone()), (4, NewSetting::Scene)]);
        let of_requests = session.to_continuation().settings;
        let expected =
            [(0, settings("a", 1)), (2, settings("b", 1)), (4, settings("b", 4)), (4, settings("b", 4))];
        assert_eq!(of_requests, expected);
        // Request 9 flushes, so that 7 and 8 become no chunk, and the prompt holds all the same.
        let session =
            continue_with(vec![(8, prompt.clone()), (9, NewSetting::FlushedScene), (10, seed.clone())]);
        assert_eq!(session.changes, [(2, prompt), (2, NewSetting::FlushedScene), (3, seed)]);
    }
}
