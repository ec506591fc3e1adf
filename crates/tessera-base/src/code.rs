//! Diagnostic codes: a stable id for each kind of diagnostic, with the page that `tessera explain`
//! prints.
//!
//! A crate defines its codes with [`codes!`](crate::codes) in `codes.rs`, ordered by id: several
//! files raise the same code, and none of them should import another for it. The application crate
//! joins the lists into a [`Registry`]. A retired id is never reused.

/// Defines the diagnostic codes of a crate, and their list `CODES`, from the id, title and page of
/// each: `T0101: "mesh is too large", "The page.";`.
#[macro_export]
macro_rules! codes {
    ($($id:ident: $title:literal, $page:literal;)+) => {
        /// Diagnostic codes of this crate, ordered by id.
        pub const CODES: &[&$crate::Code] = &[$(&$id,)+];
        $(
            #[doc = concat!("Diagnostic code `", stringify!($id), "`: ", $title, ".")]
            pub static $id: $crate::Code =
                $crate::Code { id: stringify!($id), title: $title, page: $page };
        )+
    };
}

/// A kind of diagnostic.
///
/// Id ranges: `T00` application and command line, `T01` mesh, `T02` IR text and types, `T03`
/// verifier, `T04` models, `T05` weights, `T06` plan, `T07` lockstep, `T08` devices, `T09` output
/// folders, `T11` clusters and resource needs, `T12` mapping search, `T13` CUDA, `T14` PyTorch runs.
#[derive(Debug)]
pub struct Code {
    /// Stable id such as `T0312`.
    pub id: &'static str,
    /// One line that states the problem in general terms.
    pub title: &'static str,
    /// Explanation: why the input is rejected, an example, and what to do. Plain text with blank
    /// lines between paragraphs.
    pub page: &'static str,
}

impl PartialEq for Code {
    fn eq(&self, other: &Code) -> bool {
        self.id == other.id
    }
}
impl Eq for Code {}

/// All codes of a build, sorted by id.
#[derive(Debug, Default)]
pub struct Registry {
    codes: Vec<&'static Code>,
}

impl Registry {
    /// Builds a registry from the code tables of several crates.
    ///
    /// # Panics
    /// Panics if two codes have the same id. That is a mistake in the source, which the first test
    /// that runs finds.
    #[must_use]
    pub fn new(tables: &[&[&'static Code]]) -> Registry {
        let mut codes: Vec<_> = tables.iter().flat_map(|t| t.iter().copied()).collect();
        codes.sort_by_key(|c| c.id);
        for pair in codes.windows(2) {
            assert!(pair[0].id != pair[1].id, "code {} is defined twice", pair[0].id);
        }
        Registry { codes }
    }

    /// Returns the code with this id, ignoring case.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<&'static Code> {
        self.codes.iter().copied().find(|c| c.id.eq_ignore_ascii_case(id))
    }

    /// Iterates over all codes, sorted by id.
    pub fn iter(&self) -> impl Iterator<Item = &'static Code> + '_ {
        self.codes.iter().copied()
    }
}
