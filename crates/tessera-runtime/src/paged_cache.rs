//! The state machine of KV caches in pages, which leader and workers execute identically.
//!
//! A token sequence begins with all pages of its life, grows by the rows that calls bring, and gives its pages
//! back when it ends. Cache contents are never sent: equal digests of this small state, and equal inputs, imply
//! equal caches.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;

use crate::Digest;
use crate::codes::{T0710, T0711, T0712};
use crate::wire::{NewSequence, PhaseCall, ScalarArg, SequenceRows, TokenWork};

/// Scalar [sequences, pages per sequence] of a program of tokens: the pages of each sequence, −1 behind the last.
pub(crate) const PAGES: &str = "pages";
/// Scalar [sequences] of a program of tokens: the position of the first row of each, −1 for an absent one.
const START: &str = "start";
/// Call scalar with the last row of each sequence that brings a token, numbered in the program.
const LAST: &str = "last";

/// Sizes of KV caches in pages, which are constant in a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagedCacheSpec {
    /// Positions of a page.
    pub page_rows: u32,
    /// Pages of all sequences together.
    pub pages: u32,
    /// Largest number of pages of one sequence.
    pub pages_per_sequence: u32,
}

/// The sequences that the caches hold, which is equal on every rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagedCacheState {
    spec: PagedCacheSpec,
    epoch: u32,
    /// Number of calls that brought rows; it continues across epochs.
    calls: u32,
    sequences: BTreeMap<u64, CachedSequence>,
    /// Rows of the call that has begun that its phases have not computed yet.
    due_rows: Vec<Option<SequenceRows>>,
}

/// A sequence with its pages and the number of its rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct CachedSequence {
    pages: Vec<u32>,
    rows: u32,
}

impl PagedCacheState {
    /// Creates caches without sequences, or returns T0711 for invalid sizes.
    pub fn new(spec: PagedCacheSpec) -> Result<PagedCacheState, Diagnostic> {
        let PagedCacheSpec { page_rows, pages, pages_per_sequence } = spec;
        if page_rows == 0 || pages_per_sequence == 0 || pages < pages_per_sequence {
            return Err(Diagnostic::error(&T0711, "the pages do not hold one sequence")
                .with_label("page", format!("{page_rows} positions"))
                .with_label("sequence", format!("{pages_per_sequence} pages"))
                .with_label("caches", format!("{pages} pages")));
        }
        let (sequences, due_rows) = (BTreeMap::new(), Vec::new());
        Ok(PagedCacheState { spec, epoch: 0, calls: 0, sequences, due_rows })
    }

    /// Forgets every sequence and begins an epoch.
    pub fn reset(&mut self) -> Result<(), Diagnostic> {
        self.epoch = self.next_number(self.epoch, "epoch")?;
        self.sequences.clear();
        self.due_rows.clear();
        Ok(())
    }

    /// Ends and begins the sequences of a call, and notes the rows that its phases will write.
    ///
    /// # Errors
    /// T0710 for a sequence or a page that this state does not allow, T0712 for rows that do not continue their
    /// sequence. The state is then no longer of use.
    pub fn begin_call(&mut self, work: &TokenWork) -> Result<(), Diagnostic> {
        self.calls = self.next_number(self.calls, "call")?;
        if let Some(rows) = self.due_rows.iter().flatten().next() {
            let SequenceRows { sequence, first, .. } = rows;
            let what = format!("the last call ended before row {first} of sequence {sequence}");
            return Err(self.transition_error(&what));
        }
        for id in &work.ended {
            if self.sequences.remove(id).is_none() {
                return Err(self.transition_error(&format!("sequence {id} ends, but it is not open")));
            }
        }
        for new in &work.begun {
            self.begin_sequence(new)?;
        }
        let mut seen = BTreeSet::new();
        for rows in work.rows.iter().flatten() {
            self.check_rows(rows)?;
            if !seen.insert(rows.sequence) {
                let what = format!("sequence {} has two places in one call", rows.sequence);
                return Err(self.transition_error(&what));
            }
        }
        self.due_rows.clone_from(&work.rows);
        Ok(())
    }

    /// Applies a phase of the call that has begun: as many rows of each sequence as its program computes are cached
    /// now. A sequence whose rows are complete is absent in the phases that follow.
    ///
    /// # Errors
    /// T0710 for a program of no bucket, or one without rows to compute. T0712 if the phase names other pages or
    /// positions than this state.
    pub fn apply_phase(&mut self, phase: &PhaseCall) -> Result<(), Diagnostic> {
        self.check_scalar(phase, START, 1, |_, rows, _| Some(rows.map_or(-1.0, |rows| rows.first as f32)))?;
        self.check_scalar(phase, PAGES, self.spec.pages_per_sequence as usize, |_, rows, at| {
            let pages =
                rows.and_then(|rows| self.sequences.get(&rows.sequence)).map_or(&[][..], |s| &s.pages);
            Some(pages.get(at).map_or(-1.0, |page| *page as f32))
        })?;
        let Some(of_program) = rows_of_program(&phase.program) else {
            return Err(
                self.transition_error(&format!("the program `{}` has no number of rows", phase.program))
            );
        };
        // An absent sequence has no last row, so any number stands for it.
        self.check_scalar(phase, LAST, 1, |place, rows, _| {
            let rows = rows?.count.min(of_program);
            Some((place as u32 * of_program + rows).saturating_sub(1) as f32)
        })?;
        if self.due_rows.iter().all(Option::is_none) {
            return Err(self.transition_error(&format!("phase `{}` has no rows to compute", phase.program)));
        }
        for due in &mut self.due_rows {
            let Some(rows) = due else { continue };
            let computed = rows.count.min(of_program);
            if let Some(sequence) = self.sequences.get_mut(&rows.sequence) {
                sequence.rows += computed;
            }
            rows.first += computed;
            rows.count -= computed;
            if rows.count == 0 {
                *due = None;
            }
        }
        if self.due_rows.iter().all(Option::is_none) {
            self.due_rows.clear();
        }
        Ok(())
    }

    /// Returns the number of resets so far.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Returns the number of calls that brought rows, which is the index of the next one.
    #[must_use]
    pub fn next_call(&self) -> u32 {
        self.calls
    }

    /// Returns the digest of the whole state, which must be equal on the leader and on every rank.
    #[must_use]
    pub fn state_digest(&self) -> Digest {
        Digest::hash_value("pages", self)
    }

    /// Returns epoch, call, and the sequences with their rows and pages in one line, for diagnostics.
    #[must_use]
    pub fn describe(&self) -> String {
        let sequences: Vec<String> = (self.sequences.iter())
            .map(|(id, s)| format!("sequence {id}: {} rows in pages {:?}", s.rows, s.pages))
            .collect();
        let sequences = if sequences.is_empty() { "no sequence".to_string() } else { sequences.join("; ") };
        format!("epoch {}, call {}, {sequences}", self.epoch, self.calls)
    }

    fn begin_sequence(&mut self, new: &NewSequence) -> Result<(), Diagnostic> {
        let NewSequence { sequence, pages } = new;
        let refuse = |what: String| Err(self.transition_error(&format!("sequence {sequence} {what}")));
        if self.sequences.contains_key(sequence) {
            return refuse("begins a second time".to_string());
        }
        if pages.len() > self.spec.pages_per_sequence as usize {
            return refuse(format!("has {} pages, more than a sequence may have", pages.len()));
        }
        for (i, page) in pages.iter().enumerate() {
            if *page >= self.spec.pages {
                return refuse(format!("has page {page}, but the caches have {}", self.spec.pages));
            }
            let owner = self.sequences.iter().find(|(_, s)| s.pages.contains(page)).map(|(id, _)| *id);
            if let Some(owner) = owner.or_else(|| pages[..i].contains(page).then_some(*sequence)) {
                return refuse(format!("has page {page}, which sequence {owner} has"));
            }
        }
        self.sequences.insert(*sequence, CachedSequence { pages: pages.clone(), rows: 0 });
        Ok(())
    }

    fn check_rows(&self, rows: &SequenceRows) -> Result<(), Diagnostic> {
        let SequenceRows { sequence: id, first, count } = *rows;
        let Some(sequence) = self.sequences.get(&id) else {
            return Err(self.transition_error(&format!("rows of sequence {id}, which is not open")));
        };
        if first != sequence.rows {
            return Err(Diagnostic::error(&T0712, format!("the rows do not continue sequence {id}"))
                .with_label("envelope", format!("first row {first}"))
                .with_label("this rank", format!("{} rows", sequence.rows)));
        }
        let room = sequence.pages.len() as u64 * u64::from(self.spec.page_rows);
        if count == 0 || u64::from(first) + u64::from(count) > room {
            return Err(self.transition_error(&format!(
                "{count} rows of sequence {id} from row {first}, whose pages hold {room} rows"
            )));
        }
        Ok(())
    }

    /// Checks a scalar of the phase: `width` numbers for each place of the bucket, −1 for an absent sequence.
    fn check_scalar(
        &self,
        phase: &PhaseCall,
        name: &str,
        width: usize,
        expected: impl Fn(usize, Option<&SequenceRows>, usize) -> Option<f32>,
    ) -> Result<(), Diagnostic> {
        let Some(ScalarArg::F32s(sent)) = phase.scalar_arg(name) else { return Ok(()) };
        for (place, sent) in sent.chunks(width).enumerate() {
            let rows = self.due_rows.get(place).and_then(Option::as_ref);
            for (at, sent) in sent.iter().enumerate() {
                let Some(expected) = expected(place, rows, at) else { continue };
                if sent.get().to_bits() != expected.to_bits() {
                    let what = format!(
                        "`{name}` of phase `{}` differs from this rank's in place {place}",
                        phase.program
                    );
                    return Err(Diagnostic::error(&T0712, what)
                        .with_label("envelope", format!("{} at {at}", sent.get()))
                        .with_label("this rank", format!("{expected} at {at} ({})", self.describe())));
                }
            }
        }
        Ok(())
    }

    fn next_number(&self, number: u32, what: &str) -> Result<u32, Diagnostic> {
        let used_up = || self.transition_error(&format!("the last {what} of a session is used up"));
        number.checked_add(1).ok_or_else(used_up)
    }

    fn transition_error(&self, what: &str) -> Diagnostic {
        Diagnostic::error(&T0710, what).with_label("caches", self.describe())
    }
}

/// Returns the rows per sequence of a program, from its name: 4 for `tokens.b2.n4`.
fn rows_of_program(program: &str) -> Option<u32> {
    program.split('.').find_map(|part| part.strip_prefix('n')?.parse().ok())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SPEC: PagedCacheSpec = PagedCacheSpec { page_rows: 4, pages: 4, pages_per_sequence: 2 };

    fn begin(sequence: u64, pages: &[u32]) -> NewSequence {
        NewSequence { sequence, pages: pages.to_vec() }
    }

    fn rows(sequence: u64, first: u32, count: u32) -> Option<SequenceRows> {
        Some(SequenceRows { sequence, first, count })
    }

    fn phase(start: &[f32], pages: &[f32]) -> PhaseCall {
        let args = [(START, start), (PAGES, pages)];
        let args = args.map(|(name, values)| (name.to_string(), ScalarArg::from_f32s(values)));
        PhaseCall::new("tokens.b2.n4", args.to_vec())
    }

    /// Caches with sequence 7 of 3 rows in pages 2 and 0.
    fn state_with_sequence() -> PagedCacheState {
        let mut state = PagedCacheState::new(SPEC).unwrap();
        let work =
            TokenWork { begun: vec![begin(7, &[2, 0])], rows: vec![rows(7, 0, 3)], ..TokenWork::default() };
        state.begin_call(&work).unwrap();
        state.apply_phase(&phase(&[0.0, -1.0], &[2.0, 0.0, -1.0, -1.0])).unwrap();
        state
    }

    #[test]
    fn a_sequence_grows_by_the_rows_of_calls_and_gives_its_pages_back() {
        let mut state = state_with_sequence();
        let work = TokenWork { rows: vec![None, rows(7, 3, 1)], ..TokenWork::default() };
        state.begin_call(&work).unwrap();
        state.apply_phase(&phase(&[-1.0, 3.0], &[-1.0, -1.0, 2.0, 0.0])).unwrap();
        assert!(state.describe().contains("sequence 7: 4 rows in pages [2, 0]"), "{}", state.describe());
        let work = TokenWork { ended: vec![7], begun: vec![begin(8, &[0])], ..TokenWork::default() };
        state.begin_call(&work).unwrap();
        assert!(state.describe().contains("call 3, sequence 8: 0 rows in pages [0]"), "{}", state.describe());
        state.reset().unwrap();
        assert_eq!(state.describe(), "epoch 1, call 3, no sequence");
    }

    #[test]
    fn a_phase_names_the_last_row_of_each_present_sequence() {
        let mut state = state_with_sequence();
        state.begin_call(&TokenWork { rows: vec![None, rows(7, 3, 2)], ..TokenWork::default() }).unwrap();
        let with_last = |last: &[f32]| {
            let mut phase = phase(&[-1.0, 3.0], &[-1.0, -1.0, 2.0, 0.0]);
            phase.args.push((LAST.to_string(), ScalarArg::from_f32s(last)));
            phase
        };
        // The second place of a program of 4 rows each brings rows 4 and 5; the first one is absent.
        for absent in [0.0, 3.0] {
            state.clone().apply_phase(&with_last(&[absent, 5.0])).unwrap();
        }
        for last in [1.0, 4.0, 7.0] {
            let d = state.clone().apply_phase(&with_last(&[0.0, last])).unwrap_err();
            assert!(d.code.id == "T0712" && d.message.contains("`last`"), "{}", d.message);
        }
    }

    #[test]
    fn a_call_that_contradicts_the_state_is_refused() {
        let refused = |work: TokenWork| state_with_sequence().begin_call(&work).unwrap_err();
        let with_begun = |new| TokenWork { begun: vec![new], ..TokenWork::default() };
        let with_rows =
            |rows: &[Option<SequenceRows>]| TokenWork { rows: rows.to_vec(), ..TokenWork::default() };
        for (work, code, text) in [
            (TokenWork { ended: vec![9], ..TokenWork::default() }, "T0710", "not open"),
            (with_begun(begin(7, &[1])), "T0710", "second time"),
            (with_begun(begin(8, &[1, 2])), "T0710", "page 2, which sequence 7 has"),
            (with_begun(begin(8, &[1, 1])), "T0710", "page 1, which sequence 8 has"),
            (with_begun(begin(8, &[4])), "T0710", "page 4, but the caches have 4"),
            (with_begun(begin(8, &[1, 3, 1])), "T0710", "more than a sequence may have"),
            (with_rows(&[rows(9, 0, 1)]), "T0710", "not open"),
            (with_rows(&[rows(7, 2, 1)]), "T0712", "do not continue"),
            (with_rows(&[rows(7, 3, 6)]), "T0710", "hold 8 rows"),
            (with_rows(&[rows(7, 3, 1), rows(7, 3, 1)]), "T0710", "two places"),
        ] {
            let d = refused(work);
            assert!(d.code.id == code && d.message.contains(text), "{} {}", d.code.id, d.message);
        }
    }

    #[test]
    fn a_call_of_several_phases_brings_a_row_per_phase_until_a_sequence_is_complete() {
        let step = |start: &[f32], pages: &[f32]| PhaseCall {
            program: "tokens.b2.n1".into(),
            ..phase(start, pages)
        };
        let mut state = state_with_sequence();
        let (begun, pages) = (vec![begin(8, &[1])], [2.0, 0.0, 1.0, -1.0]);
        let work = TokenWork { begun, rows: vec![rows(7, 3, 3), rows(8, 0, 1)], ..TokenWork::default() };
        state.begin_call(&work).unwrap();
        state.apply_phase(&step(&[3.0, 0.0], &pages)).unwrap();
        let d = state.clone().apply_phase(&step(&[4.0, 1.0], &pages)).unwrap_err();
        assert!(
            d.code.id == "T0712" && d.message.contains("`start`"),
            "sequence 8 is complete: {}",
            d.message
        );
        let alone = [2.0, 0.0, -1.0, -1.0];
        state.apply_phase(&step(&[4.0, -1.0], &alone)).unwrap();
        let d = state.clone().begin_call(&TokenWork::default()).unwrap_err();
        assert!(
            d.code.id == "T0710" && d.message.contains("ended before row 5 of sequence 7"),
            "{}",
            d.message
        );
        state.apply_phase(&step(&[5.0, -1.0], &alone)).unwrap();
        let d = state.clone().apply_phase(&step(&[-1.0; 2], &[-1.0; 4])).unwrap_err();
        assert!(d.code.id == "T0710" && d.message.contains("no rows to compute"), "{}", d.message);
        assert!(state.describe().contains("sequence 7: 6 rows in pages [2, 0]"), "{}", state.describe());
        assert!(state.describe().contains("sequence 8: 1 rows in pages [1]"), "{}", state.describe());
        let d = state.apply_phase(&PhaseCall { program: "tokens.b2".into(), ..step(&[], &[]) }).unwrap_err();
        assert!(d.code.id == "T0710" && d.message.contains("no number of rows"), "{}", d.message);
    }

    #[test]
    fn a_page_table_or_a_position_that_differs_is_refused() {
        let work = TokenWork { rows: vec![rows(7, 3, 1)], ..TokenWork::default() };
        for (phase, name) in [
            (phase(&[3.0, -1.0], &[2.0, 1.0, -1.0, -1.0]), "`pages`"),
            (phase(&[4.0, -1.0], &[2.0, 0.0, -1.0, -1.0]), "`start`"),
            (phase(&[3.0, 3.0], &[2.0, 0.0, -1.0, -1.0]), "`start`"),
        ] {
            let mut state = state_with_sequence();
            state.begin_call(&work).unwrap();
            let d = state.apply_phase(&phase).unwrap_err();
            assert!(d.code.id == "T0712" && d.message.contains(name), "{}", d.message);
        }
    }
}
