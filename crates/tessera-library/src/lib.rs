//! The project's pages inside the binary: the manual, topics, explainers, cards and guides, the rules and
//! what shows them, and the site and the prompt packs that are made of them.
//!
//! The person who needs a page at 3 a.m. has the binary and no repository, so every page below `docs/`
//! is embedded. This library crate reads no file: `cargo xtask library` writes `embedded.rs` and
//! `library.json` from the pages, and the application crates write what this crate renders. It knows no
//! diagnostic code by itself; the caller passes the registry.

#![forbid(unsafe_code)]
#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

mod data;
mod embedded;
mod link;
mod pack;
mod page;
mod site;

pub use data::{Card, Claim, Drill, Explainer, Library, Rule, Symptom, Topic, User};
pub use pack::{Pack, read_packs};
pub use page::{Page, all_pages, strip_markup};
pub use site::{SiteFile, render_site};
