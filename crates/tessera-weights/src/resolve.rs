//! Matches the expected tensors with the files' tensors, and reports all differences at once.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use tessera_base::{Diagnostic, closest_name};

use crate::codes::T0506;
use crate::dtype::FileDtype;
use crate::scales::{find_scales, is_scale_name};
use crate::stored_tensor::StoredTensor;

/// A tensor that a caller needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedTensor {
    /// Canonical name, which all later reads use.
    pub name: String,
    /// Names in other styles. The i-th aliases of all tensors form one style.
    pub aliases: Vec<String>,
    /// Extent of each dim.
    pub shape: Vec<u64>,
}

impl ExpectedTensor {
    /// Returns the name in a style: the canonical name for 0, else the i-th alias if there is one.
    fn name_in_style(&self, style: usize) -> &str {
        style.checked_sub(1).and_then(|i| self.aliases.get(i)).unwrap_or(&self.name)
    }
}

/// Expected tensors by canonical name, with their locations.
pub(crate) type ResolvedTensors = BTreeMap<String, (FileDtype, StoredTensor)>;

/// Implements `WeightFiles::resolve`. `at` names the files, and `outer_prefix` is a prefix of all names
/// in them that `stored` omits.
pub(crate) fn resolve_tensors(
    at: &str,
    outer_prefix: &str,
    stored: &BTreeMap<String, StoredTensor>,
    expected: &[ExpectedTensor],
) -> Result<ResolvedTensors, Diagnostic> {
    let prefix = common_prefix(stored, expected);
    let found: BTreeMap<&str, &StoredTensor> =
        stored.iter().map(|(name, t)| (&name[prefix.len()..], t)).collect();
    let (style, claims) = claim_names(&found, expected);
    let mut claimed: HashSet<&str> = claims.iter().flatten().copied().collect();
    // Without a tensor in FP8, a scale belongs to nothing and is an extra tensor.
    if claimed.iter().any(|name| found[name].dtype == FileDtype::E4m3.name()) {
        claimed.extend(found.keys().filter(|name| is_scale_name(name, &found)));
    }
    let extra: BTreeMap<&str, &StoredTensor> =
        found.iter().filter(|(name, _)| !claimed.contains(**name)).map(|(n, t)| (*n, *t)).collect();

    let mut problems = ResolveProblems::default();
    let mut out = ResolvedTensors::new();
    let mut seen = BTreeSet::new();
    for (e, claim) in expected.iter().zip(&claims) {
        if !seen.insert(&e.name) {
            problems.duplicates.push(format!("expected twice: {}", e.name));
            continue;
        }
        let Some(name) = claim else {
            let suggest = problems.missing.len() < MAX_SUGGESTIONS;
            let near = if suggest { nearest_extra(e, style, &extra) } else { String::new() };
            let name = e.name_in_style(style);
            problems.missing.push(format!("missing: {outer_prefix}{prefix}{name} {:?}{near}", e.shape));
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
                "unsupported dtype: {}: expected F32, F16, BF16 or F8_E4M3 with scales, found {}{alias}",
                e.name, t.dtype
            )),
            Some(FileDtype::E4m3) => match find_scales(name, t, &found) {
                Ok(scales) => {
                    out.insert(e.name.clone(), (FileDtype::E4m3, t.with_scales(scales)));
                }
                Err(why) => problems.dtype.push(format!("{}: {why}{alias}", e.name)),
            },
            Some(dtype) => {
                out.insert(e.name.clone(), (dtype, t.clone()));
            }
        }
    }
    problems.extra = extra.iter().map(|(n, t)| format!("extra: {n} {} {:?}", t.dtype, t.shape)).collect();
    let prefix = format!("{outer_prefix}{prefix}");
    match problems.into_diagnostic(at, expected.len(), found.len(), &prefix) {
        None => Ok(out),
        Some(d) => Err(d),
    }
}

/// Maximum number of suggestions. Each one costs a comparison with every extra name; beyond this
/// many, the two models are simply different.
const MAX_SUGGESTIONS: usize = 40;

/// Prefixes that training code adds to a model's tensor names.
const WRAPPERS: [&str; 4] = ["model.", "generator.", "diffusion_model.", "module."];

/// Returns the wrapper prefixes that all stored names have, unless an expected name has them too.
fn common_prefix<'a>(stored: &'a BTreeMap<String, StoredTensor>, expected: &[ExpectedTensor]) -> &'a str {
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

/// Determines the naming style of the files, and for each expected tensor the stored name. The best
/// style claims first, because one name may denote different tensors in different styles.
fn claim_names<'a>(
    found: &BTreeMap<&'a str, &StoredTensor>,
    expected: &[ExpectedTensor],
) -> (usize, Vec<Option<&'a str>>) {
    let styles = 1 + expected.iter().map(|e| e.aliases.len()).max().unwrap_or(0);
    let hits = |style: usize| expected.iter().filter(|e| found.contains_key(e.name_in_style(style))).count();
    let best = (0..styles).rev().max_by_key(|s| hits(*s)).unwrap_or(0);

    let mut taken = HashSet::new();
    let mut take_name = |name: &str| {
        let (name, _) = found.get_key_value(name)?;
        taken.insert(*name).then_some(*name)
    };
    let mut claims: Vec<Option<&str>> = expected.iter().map(|e| take_name(e.name_in_style(best))).collect();
    for (e, claim) in expected.iter().zip(&mut claims) {
        if claim.is_none() {
            *claim = (0..styles).find_map(|s| take_name(e.name_in_style(s)));
        }
    }
    (best, claims)
}

/// Suggests an extra tensor with a similar name ("; the files have …"), preferably one of the same
/// shape.
fn nearest_extra(e: &ExpectedTensor, style: usize, extra: &BTreeMap<&str, &StoredTensor>) -> String {
    let name = e.name_in_style(style);
    let same_shape = extra.iter().filter(|(_, t)| t.shape == e.shape).map(|(n, _)| *n);
    match closest_name(name, same_shape).or_else(|| closest_name(name, extra.keys().copied())) {
        Some(near) => format!("; the files have {near} {:?}", extra[near].shape),
        None => String::new(),
    }
}

#[derive(Default)]
struct ResolveProblems {
    missing: Vec<String>,
    extra: Vec<String>,
    misshapen: Vec<String>,
    dtype: Vec<String>,
    duplicates: Vec<String>,
}

impl ResolveProblems {
    fn into_diagnostic(self, at: &str, expected: usize, found: usize, prefix: &str) -> Option<Diagnostic> {
        let kinds = [
            (self.missing, "missing"),
            (self.extra, "extra"),
            (self.misshapen, "misshapen"),
            (self.dtype, "of an unsupported dtype"),
            (self.duplicates, "expected twice"),
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
            Diagnostic::error(&T0506, format!("the weights do not match the model: {}", counts.join(", ")))
                .with_label("the model", format!("expects {expected} tensors"))
                .with_label(at, format!("contains {found} tensors"))
                .with_hint("check that config and weights belong to the same model and the same revision");
        if !prefix.is_empty() {
            d = d.with_note(format!(
                "all names in the files begin with {prefix}, which extra names omit here"
            ));
        }
        // The first few notes of each kind come first, so that a shortened list still shows every
        // kind.
        let lead = |notes: &[String]| notes[..notes.len().min(LEADING_NOTES)].to_vec();
        let rest = |notes: &[String]| notes[notes.len().min(LEADING_NOTES)..].to_vec();
        d.notes.extend(kinds.iter().flat_map(|(notes, _)| lead(notes)));
        d.notes.extend(kinds.iter().flat_map(|(notes, _)| rest(notes)));
        Some(d)
    }
}

const LEADING_NOTES: usize = 8;
