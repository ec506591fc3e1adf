//! Matching what a caller expects with what the files hold, and saying everything that differs at once.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use tessera_base::{Code, Diagnostic, nearest};

use crate::dtype::FileDtype;
use crate::files::Stored;

/// A tensor that a caller needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    /// Canonical name: what the tensor is called from here on.
    pub name: String,
    /// Its names in other styles. The i-th aliases of all tensors form one style.
    pub aliases: Vec<String>,
    /// Extent of each dim.
    pub shape: Vec<u64>,
}

impl Expected {
    /// The name in a style: 0 is canonical, i the i-th alias where there is one.
    fn in_style(&self, style: usize) -> &str {
        style.checked_sub(1).and_then(|i| self.aliases.get(i)).unwrap_or(&self.name)
    }
}

/// Expected tensors by canonical name, with their places.
pub(crate) type Resolved = BTreeMap<String, (FileDtype, Stored)>;

/// See `WeightFiles::resolve`. `at` names the files.
pub(crate) fn resolve(
    at: &str,
    stored: &BTreeMap<String, Stored>,
    expected: &[Expected],
) -> Result<Resolved, Diagnostic> {
    let prefix = common_prefix(stored, expected);
    let found: BTreeMap<&str, &Stored> = stored.iter().map(|(name, t)| (&name[prefix.len()..], t)).collect();
    let (style, claims) = claim(&found, expected);
    let claimed: HashSet<&str> = claims.iter().flatten().copied().collect();
    let extra: BTreeMap<&str, &Stored> =
        found.iter().filter(|(name, _)| !claimed.contains(**name)).map(|(n, t)| (*n, *t)).collect();

    let mut problems = Problems::default();
    let mut out = Resolved::new();
    let mut seen = BTreeSet::new();
    for (e, claim) in expected.iter().zip(&claims) {
        if !seen.insert(&e.name) {
            problems.twice.push(format!("expected twice: {}", e.name));
            continue;
        }
        let Some(name) = claim else {
            let suggest = problems.missing.len() < MAX_SUGGESTIONS;
            let near = if suggest { nearest_extra(e, style, &extra) } else { String::new() };
            problems.missing.push(format!("missing: {} {:?}{near}", e.name, e.shape));
            continue;
        };
        let t = found[name];
        let alias = if *name == e.name { String::new() } else { format!(" as {name}") };
        if t.shape != e.shape {
            problems
                .misshapen
                .push(format!("misshapen: {}: expected {:?}, found {:?}{alias}", e.name, e.shape, t.shape));
        }
        match FileDtype::from_name(&t.dtype) {
            None => problems.dtype.push(format!(
                "unsupported dtype: {}: expected F32, F16 or BF16, found {}{alias}",
                e.name, t.dtype
            )),
            Some(dtype) => {
                out.insert(e.name.clone(), (dtype, t.clone()));
            }
        }
    }
    problems.extra = extra.iter().map(|(n, t)| format!("extra: {n} {} {:?}", t.dtype, t.shape)).collect();
    match problems.diagnostic(at, expected.len(), found.len(), prefix) {
        None => Ok(out),
        Some(d) => Err(d),
    }
}

/// Suggestions cost a comparison with every extra name; beyond this many the two models are simply different.
const MAX_SUGGESTIONS: usize = 40;

/// Wrappers that training code leaves around a model's names.
const WRAPPERS: [&str; 2] = ["model.", "generator."];

/// The wrappers that all stored names begin with, unless some expected name does too.
fn common_prefix<'a>(stored: &'a BTreeMap<String, Stored>, expected: &[Expected]) -> &'a str {
    let Some(first) = stored.keys().next() else { return "" };
    let wanted = |w: &str| {
        expected.iter().any(|e| e.name.starts_with(w) || e.aliases.iter().any(|a| a.starts_with(w)))
    };
    let mut len = 0;
    while let Some(wrapper) = WRAPPERS.iter().find(|w| first[len..].starts_with(**w)) {
        let to = len + wrapper.len();
        if wanted(wrapper) || stored.keys().any(|name| !name.starts_with(&first[..to])) {
            break;
        }
        len = to;
    }
    &first[..len]
}

/// The style that the files follow, and for each expected tensor the stored name it takes. The best style claims
/// first, because a name may mean one tensor in one style and another tensor in another.
fn claim<'a>(found: &BTreeMap<&'a str, &Stored>, expected: &[Expected]) -> (usize, Vec<Option<&'a str>>) {
    let styles = 1 + expected.iter().map(|e| e.aliases.len()).max().unwrap_or(0);
    let hits = |style: usize| expected.iter().filter(|e| found.contains_key(e.in_style(style))).count();
    let best = (0..styles).rev().max_by_key(|s| hits(*s)).unwrap_or(0);

    let mut taken = HashSet::new();
    let mut take = |name: &str| {
        let (name, _) = found.get_key_value(name)?;
        taken.insert(*name).then_some(*name)
    };
    let mut claims: Vec<Option<&str>> = expected.iter().map(|e| take(e.in_style(best))).collect();
    for (e, claim) in expected.iter().zip(&mut claims) {
        if claim.is_none() {
            *claim = (0..styles).find_map(|s| take(e.in_style(s)));
        }
    }
    (best, claims)
}

/// "; the file has …": an extra tensor of the same shape if one has a near name, else any.
fn nearest_extra(e: &Expected, style: usize, extra: &BTreeMap<&str, &Stored>) -> String {
    let name = e.in_style(style);
    let same_shape = extra.iter().filter(|(_, t)| t.shape == e.shape).map(|(n, _)| *n);
    match nearest(name, same_shape).or_else(|| nearest(name, extra.keys().copied())) {
        Some(near) => format!("; the files have {near} {:?}", extra[near].shape),
        None => String::new(),
    }
}

#[derive(Default)]
struct Problems {
    missing: Vec<String>,
    extra: Vec<String>,
    misshapen: Vec<String>,
    dtype: Vec<String>,
    twice: Vec<String>,
}

impl Problems {
    fn diagnostic(self, at: &str, expected: usize, found: usize, prefix: &str) -> Option<Diagnostic> {
        let kinds = [
            (self.missing, "missing"),
            (self.extra, "extra"),
            (self.misshapen, "misshapen"),
            (self.dtype, "of an unsupported dtype"),
            (self.twice, "expected twice"),
        ];
        let counts: Vec<String> = kinds
            .iter()
            .filter(|(notes, _)| !notes.is_empty())
            .map(|(notes, kind)| format!("{} {kind}", notes.len()))
            .collect();
        if counts.is_empty() {
            return None;
        }
        let mut d =
            Diagnostic::error(&T0506, format!("the weights are not this model's: {}", counts.join(", ")))
                .at("the model", format!("expects {expected} tensors"))
                .at(at, format!("holds {found} tensors"))
                .hint("check that config and weights belong to one model and one revision of it");
        if !prefix.is_empty() {
            d = d.note(format!("all names in the files begin with {prefix}, which is left out here"));
        }
        // A few of each kind lead, so that a list cut for the eye still shows every kind.
        let lead = |notes: &[String]| notes[..notes.len().min(LEAD)].to_vec();
        let rest = |notes: &[String]| notes[notes.len().min(LEAD)..].to_vec();
        d.notes.extend(kinds.iter().flat_map(|(notes, _)| lead(notes)));
        d.notes.extend(kinds.iter().flat_map(|(notes, _)| rest(notes)));
        Some(d)
    }
}

const LEAD: usize = 8;

pub(crate) static T0506: Code = Code {
    id: "T0506",
    title: "weights and model do not match",
    page: "The model's config says which tensors there must be and of which shape. The files must hold exactly these: \
a missing tensor would have to be invented, an extra one is a part of the model that would be silently dropped, and a \
misshapen one belongs to another size. All differences are listed at once; `--format json` lists them without a \
limit.\n\n\
Read the counts first. Everything missing and as many extra: the files use names that Tessera does not know, or \
are another architecture. Everything misshapen: the config is of another size. A few missing: a partial conversion, \
or a typing slip that the suggested name shows. A few extra: often a LoRA, an EMA copy or optimizer state that should \
have been left out when the file was written.\n\n\
Readable dtypes are F32, F16 and BF16. F64, integers and FP8 are refused: converting them has choices (rounding, \
scales) that belong to whoever exports the model.",
};
