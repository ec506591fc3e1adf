//! A stable name for one kind of diagnostic, with the page that `tessera explain` prints.
//!
//! A code is a `static` beside the code that raises it. Rooms list theirs in a `CODES` table; the door joins
//! the tables into a [`Registry`]. A retired id stays listed as reserved and is never used again.

/// One kind of diagnostic.
///
/// Ranges: `T00` door and command line, `T01` mesh, `T02` IR text and types, `T03` judge, `T04` models,
/// `T05` weights, `T06` plan, `T07` lockstep, `T08` devices, `T09` output folders, `T11` clusters and what things take, `T12` the search over mappings.
#[derive(Debug)]
pub struct Code {
    /// Stable id such as `T0312`.
    pub id: &'static str,
    /// One line: what is wrong, in general.
    pub title: &'static str,
    /// Why it is refused, an example, and what to do. Plain text, paragraphs separated by blank lines.
    pub page: &'static str,
}

impl PartialEq for Code {
    fn eq(&self, other: &Code) -> bool {
        self.id == other.id
    }
}
impl Eq for Code {}

/// All codes of a build, in order of id.
#[derive(Debug, Default)]
pub struct Registry {
    codes: Vec<&'static Code>,
}

impl Registry {
    /// Joins tables of codes.
    ///
    /// # Panics
    /// On two codes with one id: that is a mistake in the source, found by the first test that runs.
    #[must_use]
    pub fn new(tables: &[&[&'static Code]]) -> Registry {
        let mut codes: Vec<_> = tables.iter().flat_map(|t| t.iter().copied()).collect();
        codes.sort_by_key(|c| c.id);
        for pair in codes.windows(2) {
            assert!(pair[0].id != pair[1].id, "code {} is defined twice", pair[0].id);
        }
        Registry { codes }
    }

    /// The code with this id, upper or lower case.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<&'static Code> {
        self.codes.iter().copied().find(|c| c.id.eq_ignore_ascii_case(id))
    }

    /// Every code, in order of id.
    pub fn iter(&self) -> impl Iterator<Item = &'static Code> + '_ {
        self.codes.iter().copied()
    }
}
