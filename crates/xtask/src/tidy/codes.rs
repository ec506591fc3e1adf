//! Checks the diagnostic codes: each is defined once, by the macro `codes!`, and has an explain page
//! of some length.

use std::collections::BTreeMap;

use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned;
use syn::visit::Visit;
use syn::{ExprStruct, Ident, LitStr, Macro, Member, Token};

use super::Problem;
use super::source::{Source, first_line};
use crate::tree::Tree;

/// Minimum number of sentences of a page: what is wrong, and what to do.
const MIN_SENTENCES: usize = 2;

/// One code that a source defines: in `codes!`, or as `Code { id: …, page: … }`.
struct Definition<'a> {
    path: &'a str,
    line: usize,
    id: String,
    page: String,
    in_test: bool,
    in_macro: bool,
}

/// Checks all definitions and all mentions of codes, in sources and pages.
pub(super) fn check(tree: &Tree, sources: &[Source<'_>], found: &mut Vec<Problem>) {
    // The codes in this crate are examples.
    let sources: Vec<&Source<'_>> = sources.iter().filter(|s| s.crate_name() != "xtask").collect();
    let mut definitions = Vec::new();
    for s in &sources {
        let mut finder = CodeFinder { source: s, definitions: Vec::new() };
        finder.visit_file(&s.syntax);
        definitions.extend(finder.definitions);
    }
    let mut defined: BTreeMap<&str, &Definition<'_>> = BTreeMap::new();
    for d in definitions.iter().filter(|d| !d.in_test) {
        if let Some(first) = defined.get(d.id.as_str()) {
            let message =
                format!("{} is also defined at {}:{}: choose another id", d.id, first.path, first.line);
            found.push(Problem::new(d.path, d.line, message));
            continue;
        }
        check_definition(d, found);
        defined.insert(&d.id, d);
    }
    let is_known_to_code = |id: &str| definitions.iter().any(|d| d.id == id);
    for s in &sources {
        report_unknown_ids(s.path, s.text, &is_known_to_code, found);
    }
    for f in tree.files.iter().filter(|f| f.path.ends_with(".md")) {
        report_unknown_ids(&f.path, &f.text, &|id| defined.contains_key(id), found);
    }
}

/// Checks the length of a code's page, and that `codes!` defines the code and lists it.
fn check_definition(d: &Definition<'_>, found: &mut Vec<Problem>) {
    let mut report = |message| found.push(Problem::new(d.path, d.line, message));
    let sentences = d.page.split_inclusive(['.', '!', '?']).filter(|s| ends_sentence(s)).count();
    if sentences < MIN_SENTENCES {
        report(format!(
            "the page of {} has {sentences} sentence(s): state what is wrong and what to do",
            d.id
        ));
    }
    if !d.in_macro {
        report(format!("define {} in `codes!`, which lists it", d.id));
    }
}

/// Reports the ids of a text that no definition has.
fn report_unknown_ids(path: &str, text: &str, is_known: &dyn Fn(&str) -> bool, found: &mut Vec<Problem>) {
    for (i, line) in text.lines().enumerate() {
        for (_, id) in find_ids(line).filter(|(_, id)| !is_known(id)) {
            found.push(Problem::new(path, i + 1, format!("code {id} is not defined: correct the id")));
        }
    }
}

/// Collects the definitions of codes.
struct CodeFinder<'s, 'a> {
    source: &'s Source<'a>,
    definitions: Vec<Definition<'a>>,
}

impl CodeFinder<'_, '_> {
    fn push_definition(&mut self, line: usize, id: String, page: String, in_macro: bool) {
        let in_test = self.source.in_test(line);
        self.definitions.push(Definition { path: self.source.path, line, id, page, in_test, in_macro });
    }
}

impl<'ast> Visit<'ast> for CodeFinder<'_, '_> {
    fn visit_expr_struct(&mut self, i: &'ast ExprStruct) {
        let field = |name: &str| {
            let field = i.fields.iter().find(|f| matches!(&f.member, Member::Named(n) if n == name))?;
            let mut literals = Literals::default();
            literals.visit_expr(&field.expr);
            Some(literals.text)
        };
        if let (Some(id), Some(page)) = (field("id"), field("page"))
            && find_ids(&id).next() == Some((0, id.as_str()))
        {
            self.push_definition(first_line(i.span()), id, page, false);
        }
        syn::visit::visit_expr_struct(self, i);
    }

    fn visit_macro(&mut self, i: &'ast Macro) {
        if i.path.segments.last().is_some_and(|s| s.ident == "codes")
            && let Ok(list) = i.parse_body::<CodeList>()
        {
            for (id, page) in list.0 {
                self.push_definition(first_line(id.span()), id.to_string(), page.value(), true);
            }
        }
    }
}

/// The ids and pages in the body of `codes!`.
struct CodeList(Vec<(Ident, LitStr)>);

impl Parse for CodeList {
    fn parse(input: ParseStream<'_>) -> syn::Result<CodeList> {
        let mut list = Vec::new();
        while !input.is_empty() {
            let id = input.parse()?;
            input.parse::<Token![:]>()?;
            input.parse::<LitStr>()?;
            input.parse::<Token![,]>()?;
            list.push((id, input.parse()?));
            input.parse::<Token![;]>()?;
        }
        Ok(CodeList(list))
    }
}

/// The contents of all string literals of an expression.
#[derive(Default)]
struct Literals {
    text: String,
}

impl<'ast> Visit<'ast> for Literals {
    fn visit_lit_str(&mut self, literal: &'ast LitStr) {
        self.text.push_str(&literal.value());
    }
}

/// Finds every code id (`T` and four digits, as a whole word) with its offset.
pub(super) fn find_ids(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.match_indices('T').map(|(at, _)| at).filter_map(move |at| {
        let id = text.get(at..at + 5)?;
        let is_boundary = |c: Option<char>| !c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        let is_word =
            is_boundary(text[..at].chars().next_back()) && is_boundary(text[at + 5..].chars().next());
        (is_word && id[1..].bytes().all(|b| b.is_ascii_digit())).then_some((at, id))
    })
}

/// Returns whether text up to a full stop is a sentence and not a part of a dotted name.
fn ends_sentence(text: &str) -> bool {
    text.ends_with(['.', '!', '?']) && text.split_whitespace().count() >= 3
}

#[cfg(test)]
mod tests {
    use super::super::source::parse_sources;
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        let tree = Tree::from_files(&[("crates/a/src/lib.rs", text)]);
        let mut found = Vec::new();
        let sources = parse_sources(&tree, &mut found);
        check(&tree, &sources, &mut found);
        found.into_iter().map(|p| p.message).collect()
    }

    #[test]
    fn a_correct_code_passes() {
        let text = "x::codes! { T0101: \"t\", \"It is wrong here. Do this instead.\"; }\n";
        assert_eq!(problems(text), Vec::<String>::new());
    }

    #[test]
    fn every_mistake_is_reported() {
        let text = "codes! {\n T0101: \"t\", \"It is wrong here. Do this instead.\";\n T0102: \"t\", \"It is wrong.\";\n}\n\
static B: Code = Code { id: \"T0104\", title: \"t\", page: \"It is wrong here. Do this instead.\" };\n\
codes! { T0101: \"t\", \"It is wrong here. Do this instead.\"; }\n// see T0103\n";
        let found = problems(text);
        assert_eq!(found.len(), 4, "{found:?}");
        assert!(found[0].contains("has 1 sentence(s)"));
        assert!(found[1].contains("define T0104 in `codes!`"));
        assert!(found[2].contains("T0101 is also defined at crates/a/src/lib.rs:2"));
        assert!(found[3].contains("code T0103 is not defined"));
    }
}
