//! The repair of characters that were probably not meant: entities, ligatures, widths, quotes, line
//! breaks, terminal escapes and control characters.

use unicode_normalization::UnicodeNormalization;

/// Maximum repetitions of the repair. Each one decodes entities, so a text could ask for many.
const ROUNDS_MAX: usize = 16;

/// Repairs a text line by line. From the first line with a `<` on, the text counts as HTML, and its
/// entities are left to the caller.
pub(crate) fn fix_text(text: &str) -> String {
    let mut is_html = false;
    text.split_inclusive('\n')
        .map(|line| {
            is_html |= line.contains('<');
            fix_line(line, !is_html)
        })
        .collect()
}

fn fix_line(line: &str, decodes_entities: bool) -> String {
    let mut text = line.to_string();
    for _ in 0..ROUNDS_MAX {
        let decoded = if decodes_entities { decode_entities(&text) } else { text.clone() };
        let mut fixed = String::with_capacity(decoded.len());
        decoded.chars().map(decode_c1_control).for_each(|c| push_plain(c, &mut fixed));
        let fixed = remove_control_chars(&remove_terminal_escapes(&fix_line_breaks(&fixed)));
        let fixed: String = fixed.nfc().collect();
        if fixed == text {
            break;
        }
        text = fixed;
    }
    text
}

/// Decodes entities that end in a semicolon, also those of small letters that were written in
/// capitals.
fn decode_entities(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let entity = entity_at(rest).unwrap_or("&");
        out.push_str(&decode_entity(entity));
        rest = &rest[entity.len()..];
    }
    out + rest
}

/// Returns the entity at the start of the text, with `&` and `;`: at most 24 letters and digits.
fn entity_at(text: &str) -> Option<&str> {
    let number = usize::from(text[1..].starts_with('#'));
    let name = &text[1 + number..];
    let len = name.bytes().take_while(u8::is_ascii_alphanumeric).count();
    let end = 1 + number + len;
    ((1..=24).contains(&len) && text[end..].starts_with(';')).then(|| &text[..=end])
}

fn decode_entity(entity: &str) -> String {
    let decoded = htmlize::unescape(entity);
    if decoded != entity {
        // A part of a name, such as `&not` of `&notit;`, is no entity here.
        let whole = !decoded.ends_with(';') || decoded == ";";
        return if whole { decoded.into_owned() } else { entity.to_string() };
    }
    let small = entity.to_ascii_lowercase();
    let decoded = htmlize::unescape(small.as_str());
    let is_capitals = entity.len() > 2 && entity == entity.to_ascii_uppercase() && entity != small;
    let whole = decoded != small && !decoded.ends_with(';');
    if is_capitals && whole { decoded.to_uppercase() } else { entity.to_string() }
}

/// Decodes a C1 control character as Windows-1252, as browsers do.
fn decode_c1_control(c: char) -> char {
    const WINDOWS_1252: [char; 32] = [
        '€', '\u{81}', '‚', 'ƒ', '„', '…', '†', '‡', 'ˆ', '‰', 'Š', '‹', 'Œ', '\u{8d}', 'Ž', '\u{8f}',
        '\u{90}', '‘', '’', '“', '”', '•', '–', '—', '˜', '™', 'š', '›', 'œ', '\u{9d}', 'ž', 'Ÿ',
    ];
    match c {
        '\u{80}'..='\u{9f}' => WINDOWS_1252[c as usize - 0x80],
        _ => c,
    }
}

/// Pushes a character without ligature, in its usual width, and straight if it is a curly quote.
fn push_plain(c: char, out: &mut String) {
    let plain = match c {
        'Ĳ' => "IJ",
        'ĳ' => "ij",
        // The letter apostrophe of this ligature is itself a curly quote.
        'ŉ' => "'n",
        'Ǳ' => "DZ",
        'ǲ' => "Dz",
        'ǳ' => "dz",
        'Ǆ' => "DŽ",
        'ǅ' => "Dž",
        'ǆ' => "dž",
        'Ǉ' => "LJ",
        'ǈ' => "Lj",
        'ǉ' => "lj",
        'Ǌ' => "NJ",
        'ǋ' => "Nj",
        'ǌ' => "nj",
        'ﬀ' => "ff",
        'ﬁ' => "fi",
        'ﬂ' => "fl",
        'ﬃ' => "ffi",
        'ﬄ' => "ffl",
        'ﬅ' => "ſt",
        'ﬆ' => "st",
        '\u{3000}' => " ",
        '\u{2bc}' | '\u{2018}'..='\u{201b}' => "'",
        '\u{201c}'..='\u{201f}' => "\"",
        '\u{ff01}'..='\u{ffef}' => return out.extend(std::iter::once(c).nfkc()),
        _ => return out.push(c),
    };
    out.push_str(plain);
}

fn fix_line_breaks(text: &str) -> String {
    text.replace("\r\n", "\n").replace(['\r', '\u{2028}', '\u{2029}', '\u{85}'], "\n")
}

/// Removes escape sequences of terminals: ESC, `[`, numbers with semicolons, a letter.
fn remove_terminal_escapes(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("\u{1b}[") {
        out.push_str(&rest[..at]);
        let arguments = &rest[at + 2..];
        let len = arguments.find(|c: char| !c.is_numeric() && c != ';').unwrap_or(arguments.len());
        let is_escape = arguments[len..].starts_with(|c: char| c.is_ascii_alphabetic());
        let end = at + 2 + if is_escape { len + 1 } else { 0 };
        if !is_escape {
            out.push_str(&rest[at..end]);
        }
        rest = &rest[end..];
    }
    out + rest
}

fn remove_control_chars(text: &str) -> String {
    let is_removed = |c: char| {
        matches!(c, '\0'..='\u{8}' | '\u{b}' | '\u{e}'..='\u{1f}' | '\u{7f}' | '\u{206a}'..='\u{206f}' | '\u{feff}'
            | '\u{fff9}'..='\u{fffc}')
    };
    text.chars().filter(|c| !is_removed(*c)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_repair_changes_what_it_names() {
        for (text, fixed) in [
            (
                "P&EACUTE;REZ &amp;amp; &nTILDE; this&not that &notit;",
                "PÉREZ & &nTILDE; this&not that &notit;",
            ),
            ("<b> &eacute;", "<b> &eacute;"),
            ("&eacute;\n<b>\n&eacute;", "é\n<b>\n&eacute;"),
            ("ﬂuﬃest ＬＯＵＤ\u{3000}ﾀｰﾝ", "fluffiest LOUD ターン"),
            ("“a” ‘b’ ŉ", "\"a\" 'b' 'n"),
            ("a\r\nb\rc\u{2028}d", "a\nb\nc\nd"),
            ("\u{1b}[36;44mblue\u{1b}[0m \u{1b}[-", "blue [-"),
            ("\u{feff}a\u{7}b\u{fffc}", "ab"),
            ("e\u{301}", "é"),
            ("\u{93}x\u{94} \u{80}", "\"x\" €"),
        ] {
            assert_eq!(fix_text(text), fixed, "{text:?}");
        }
    }
}
