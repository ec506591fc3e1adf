//! The modules of a crate with the names that each one binds, and the resolution of paths to the
//! files that define their items.
//!
//! The resolution covers what `syn` shows: items, modules, imports, renames, globs and re-exports.
//! An item that a macro makes counts as defined by the file of the module that the path reaches.
//! Methods and fields need types and are left out.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::Visit;
use syn::{Ident, Item, ItemMacro, ItemMod, ItemUse, UseTree};

use super::source::{Source, first_line, is_punct, split_groups};

/// Index of a module in its [`ModuleTree`].
pub(super) type ModuleId = usize;

/// A path in a source, and the module in which it stands.
#[derive(Debug)]
pub(super) struct Reference {
    pub(super) module: ModuleId,
    /// The segments without generic arguments.
    pub(super) path: Vec<String>,
    pub(super) line: usize,
}

/// The modules that one root (`lib.rs` or `main.rs`) declares, without those of tests.
#[derive(Debug)]
pub(super) struct ModuleTree<'s> {
    modules: Vec<Module<'s>>,
    /// Every path in the code of the modules, imports included.
    pub(super) references: Vec<Reference>,
}

/// A module: a file, or a block within a file.
#[derive(Debug)]
struct Module<'s> {
    /// Path of the file that contains the module.
    file: &'s str,
    parent: Option<ModuleId>,
    names: BTreeMap<String, Binding>,
    /// Paths behind `use PATH::*`.
    globs: Vec<Vec<String>>,
}

/// The meaning of a name in a module.
#[derive(Debug)]
enum Binding {
    /// The module's file defines an item of this name.
    Item,
    Module(ModuleId),
    Import(Vec<String>),
}

/// The meaning of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target<'s> {
    Module(ModuleId),
    /// An item, with the file that defines it.
    Item(&'s str),
}

/// Maximum number of imports that one path passes through; a longer chain is a cycle of re-exports.
const MAX_IMPORTS: usize = 16;

impl<'s> ModuleTree<'s> {
    /// Builds the tree of the root file at `root` from the sources of its crate.
    pub(super) fn new(sources: &'s [Source<'_>], root: &'s Source<'_>) -> ModuleTree<'s> {
        let mut tree = ModuleTree { modules: Vec::new(), references: Vec::new() };
        tree.add_module(root, None, root.module_folder(), &root.syntax.items, sources);
        tree
    }

    /// Returns the file that defines the item behind a reference; `None` for modules, for names of
    /// other crates, and for local names.
    pub(super) fn defining_file(&self, reference: &Reference) -> Option<&'s str> {
        match self.resolve(reference.module, &reference.path, MAX_IMPORTS)? {
            Target::Item(file) => Some(file),
            Target::Module(_) => None,
        }
    }

    /// Returns the file that contains a module.
    pub(super) fn file(&self, module: ModuleId) -> &'s str {
        self.modules[module].file
    }

    /// Returns the files of the tree, and for each the files of the modules above it.
    pub(super) fn ancestor_files(&self) -> BTreeMap<&'s str, BTreeSet<&'s str>> {
        let mut ancestors: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for module in &self.modules {
            let above = ancestors.entry(module.file).or_default();
            let mut parent = module.parent;
            while let Some(id) = parent {
                above.insert(self.modules[id].file);
                parent = self.modules[id].parent;
            }
        }
        ancestors
    }

    fn resolve(&self, from: ModuleId, path: &[String], imports_left: usize) -> Option<Target<'s>> {
        let mut rest = path.iter();
        let mut at = match rest.next()?.as_str() {
            "crate" => 0,
            "self" => from,
            "super" => self.modules[from].parent?,
            name => match self.look_up(from, name, imports_left)? {
                Target::Module(id) => id,
                item => return Some(item),
            },
        };
        for name in rest {
            at = match (name.as_str(), self.look_up(at, name, imports_left)) {
                ("super", _) => self.modules[at].parent?,
                (_, Some(Target::Module(id))) => id,
                (_, Some(item)) => return Some(item),
                // A macro makes the item.
                (_, None) => return Some(Target::Item(self.modules[at].file)),
            };
        }
        Some(Target::Module(at))
    }

    /// Returns what a name means in a module.
    fn look_up(&self, module: ModuleId, name: &str, imports_left: usize) -> Option<Target<'s>> {
        let imports_left = imports_left.checked_sub(1)?;
        let m = &self.modules[module];
        match m.names.get(name) {
            Some(Binding::Item) => Some(Target::Item(m.file)),
            Some(Binding::Module(id)) => Some(Target::Module(*id)),
            // An import of the name by itself, such as `use serde;`, names another crate.
            Some(Binding::Import(path)) if path.len() == 1 && path[0] == name => None,
            Some(Binding::Import(path)) => self.resolve(module, path, imports_left),
            None => m.globs.iter().find_map(|glob| match self.resolve(module, glob, imports_left)? {
                Target::Module(id) if id != module => self.look_up_own(id, name, imports_left),
                _ => None,
            }),
        }
    }

    /// Returns what a glob import of a module provides under a name: without this restriction, two
    /// modules that import each other by globs would be searched forever.
    fn look_up_own(&self, module: ModuleId, name: &str, imports_left: usize) -> Option<Target<'s>> {
        self.modules[module].names.contains_key(name).then(|| self.look_up(module, name, imports_left))?
    }

    /// Adds a module, its names and references, and its child modules.
    fn add_module(
        &mut self,
        source: &'s Source<'_>,
        parent: Option<ModuleId>,
        folder: &str,
        items: &'s [Item],
        sources: &'s [Source<'_>],
    ) -> ModuleId {
        let id = self.modules.len();
        self.modules.push(Module { file: source.path, parent, names: BTreeMap::new(), globs: Vec::new() });
        let mut collector = Collector::default();
        let mut children: Vec<&ItemMod> = Vec::new();
        let is_code = |line: usize| !source.in_test(line);
        for item in items {
            match item {
                Item::Mod(child) if is_code(first_line(child.mod_token.span)) => children.push(child),
                Item::Mod(_) => {}
                _ => collector.visit_item(item),
            }
            if let Some(name) = item_name(item).filter(|name| is_code(first_line(name.span()))) {
                self.modules[id].names.insert(name.to_string(), Binding::Item);
            }
        }
        for (name, path, _) in collector.imports.into_iter().filter(|(.., line)| is_code(*line)) {
            self.modules[id].names.entry(name).or_insert(Binding::Import(path));
        }
        let globs = collector.globs.into_iter().filter(|(_, line)| is_code(*line));
        self.modules[id].globs = globs.map(|(path, _)| path).collect();
        let paths = collector.paths.into_iter().filter(|(_, line)| is_code(*line));
        self.references.extend(paths.map(|(path, line)| Reference { module: id, path, line }));
        for child in children {
            let child_folder = format!("{folder}/{}", child.ident);
            let child_id = match &child.content {
                Some((_, items)) => self.add_module(source, Some(id), &child_folder, items, sources),
                None => {
                    let is_child_file = |s: &&Source<'_>| {
                        s.path == format!("{child_folder}.rs") || s.path == format!("{child_folder}/mod.rs")
                    };
                    let Some(file) = sources.iter().find(is_child_file) else { continue };
                    self.add_module(file, Some(id), file.module_folder(), &file.syntax.items, sources)
                }
            };
            self.modules[id].names.insert(child.ident.to_string(), Binding::Module(child_id));
        }
        id
    }
}

/// Returns the name that an item binds, except of modules and imports.
fn item_name(item: &Item) -> Option<&Ident> {
    Some(match item {
        Item::Const(i) => &i.ident,
        Item::Enum(i) => &i.ident,
        Item::Fn(i) => &i.sig.ident,
        Item::Macro(ItemMacro { ident: Some(ident), .. }) => ident,
        Item::Static(i) => &i.ident,
        Item::Struct(i) => &i.ident,
        Item::Trait(i) => &i.ident,
        Item::Type(i) => &i.ident,
        Item::Union(i) => &i.ident,
        _ => return None,
    })
}

/// Collects paths and imports of the items of one module, with their lines.
#[derive(Default)]
struct Collector {
    paths: Vec<(Vec<String>, usize)>,
    imports: Vec<(String, Vec<String>, usize)>,
    globs: Vec<(Vec<String>, usize)>,
}

impl Collector {
    /// Adds every path of an import, each with `prefix` before it.
    fn add_import(&mut self, prefix: &[String], tree: &UseTree) {
        let join = |ident: &Ident| {
            let mut path = prefix.to_vec();
            // `use a::{self}` imports `a`.
            if prefix.is_empty() || ident != "self" {
                path.push(ident.to_string());
            }
            path
        };
        let (path, name, line) = match tree {
            UseTree::Path(p) => return self.add_import(&join(&p.ident), &p.tree),
            UseTree::Group(group) => return group.items.iter().for_each(|t| self.add_import(prefix, t)),
            UseTree::Glob(g) => return self.globs.push((prefix.to_vec(), first_line(g.star_token.span))),
            UseTree::Name(n) => (join(&n.ident), None, first_line(n.ident.span())),
            UseTree::Rename(r) => (join(&r.ident), Some(r.rename.to_string()), first_line(r.ident.span())),
        };
        if let Some(name) = name.or_else(|| path.last().cloned()).filter(|n| n != "_") {
            self.imports.push((name, path.clone(), line));
        }
        self.paths.push((path, line));
    }

    /// Adds the paths of at least two segments in the tokens of a macro. A single name may be a
    /// variable there.
    fn add_macro_paths(&mut self, tokens: &TokenStream) {
        for list in split_groups(tokens.clone()) {
            let mut i = 0;
            while i < list.len() {
                let mut path = Vec::new();
                let line = first_line(list[i].span());
                while let Some(TokenTree::Ident(name)) = list.get(i) {
                    path.push(name.to_string());
                    i += 1;
                    if !(is_punct(&list, i, ':') && is_punct(&list, i + 1, ':')) {
                        break;
                    }
                    i += 2;
                }
                if path.len() > 1 {
                    self.paths.push((path, line));
                }
                i += 1;
            }
        }
    }
}

impl<'ast> Visit<'ast> for Collector {
    fn visit_item_use(&mut self, i: &'ast ItemUse) {
        if i.leading_colon.is_none() {
            self.add_import(&[], &i.tree);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            let segments: Vec<String> = path.segments.iter().map(|s| s.ident.to_string()).collect();
            let line = path.segments.first().map_or(0, |s| first_line(s.ident.span()));
            self.paths.push((segments, line));
        }
        syn::visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, mac: &'ast syn::Macro) {
        self.visit_path(&mac.path);
        self.add_macro_paths(&mac.tokens);
    }

    // Neither says which item is used.
    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}
}
