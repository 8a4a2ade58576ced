//! The rules of STYLE.md that can be checked line by line.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::tree;

const FUNCTION_LINES_MAX: usize = 70;
const FILE_LINES_MAX: usize = 1000;
const LINE_COLUMNS_MAX: usize = 100;
const UNSAFE_ROOMS: [&str; 5] =
    ["crates/kernel/", "crates/guest/", "crates/guest-abi/", "crates/api/", "guests/"];
/// Words that say that something is not finished. Split here, so that this file passes.
const UNFINISHED: [&str; 5] = [
    concat!("todo", "!("),
    concat!("unimplemented", "!("),
    concat!("dbg", "!("),
    concat!("#[", "ignore"),
    concat!("allow(", "dead_code"),
];

/// A rule that a line breaks.
struct Finding {
    file: PathBuf,
    line: usize,
    what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.what)
    }
}

/// Checks every source file; prints what breaks a rule.
pub fn tidy() -> Result<()> {
    let mut findings = Vec::new();
    let mut checked = 0;
    for file in tree::files()? {
        let bytes = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
        let Ok(text) = String::from_utf8(bytes) else { continue };
        if let Some(language) = Language::of(&file, &text) {
            check(&file, &text, language, &mut findings);
            checked += 1;
        }
    }
    for finding in &findings {
        println!("{finding}");
    }
    if !findings.is_empty() {
        bail!("{} lines break a rule of STYLE.md", findings.len());
    }
    println!("tidy: {checked} files");
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Language {
    Rust,
    Go,
    C,
    Python,
    Shell,
}

impl Language {
    fn of(file: &Path, text: &str) -> Option<Language> {
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("rs") => Some(Language::Rust),
            Some("go") => Some(Language::Go),
            Some("c" | "h") => Some(Language::C),
            Some("py") => Some(Language::Python),
            Some("sh") => Some(Language::Shell),
            Some(_) => None,
            None => match text.lines().next()? {
                first if !first.starts_with("#!") => None,
                first if first.contains("python") => Some(Language::Python),
                first if first.ends_with("sh") => Some(Language::Shell),
                _ => None,
            },
        }
    }

    /// True if a function begins at this line, which has no indentation left.
    fn starts_function(self, line: &str) -> bool {
        match self {
            Language::Rust => {
                let modifiers = [
                    "pub ",
                    "pub(crate) ",
                    "pub(super) ",
                    "const ",
                    "async ",
                    "unsafe ",
                    "extern \"C\" ",
                ];
                let mut rest = line;
                while let Some(shorter) = modifiers.iter().find_map(|word| rest.strip_prefix(word))
                {
                    rest = shorter;
                }
                rest.starts_with("fn ")
            }
            Language::Go => line.starts_with("func "),
            Language::C => line.ends_with('{') && line.contains('(') && !line.starts_with(' '),
            Language::Python => line.starts_with("def ") || line.starts_with("async def "),
            Language::Shell => line.ends_with("() {"),
        }
    }
}

fn check(file: &Path, text: &str, language: Language, findings: &mut Vec<Finding>) {
    let lines: Vec<&str> = text.lines().collect();
    let mut find = |line: usize, what: String| {
        findings.push(Finding { file: file.to_owned(), line: line + 1, what });
    };
    if lines.len() > FILE_LINES_MAX {
        find(0, format!("{} lines in a file, {FILE_LINES_MAX} allowed", lines.len()));
    }
    for (number, line) in lines.iter().enumerate() {
        let tabs_as = if language == Language::Go { 3 } else { 0 };
        let columns = line.chars().count() + tabs_as * line.matches('\t').count();
        if columns > LINE_COLUMNS_MAX {
            find(number, format!("{columns} columns, {LINE_COLUMNS_MAX} allowed"));
        }
        let is_unfinished = |word: &&&str| line.contains(**word) && !line.contains("reason = ");
        if let Some(word) = UNFINISHED.iter().find(is_unfinished) {
            find(number, format!("`{word}` is not for finished code"));
        }
        if let Some(length) = function_lines(&lines[number..], language)
            && length > FUNCTION_LINES_MAX
        {
            find(number, format!("{length} lines in a function, {FUNCTION_LINES_MAX} allowed"));
        }
    }
    if language == Language::Rust {
        check_unsafe(file, &lines, &mut find);
    }
}

/// How many lines the function that begins at the first of `lines` has, if one does. Relies on
/// the formatters: a body ends at the first line as little indented as its head.
fn function_lines(lines: &[&str], language: Language) -> Option<usize> {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let head = lines.first()?;
    let depth = indent(head);
    let head_text = if language == Language::C { head } else { head.trim_start() };
    if !language.starts_function(head_text) {
        return None;
    }
    if language == Language::Python {
        let is_after = |line: &&str| !line.trim().is_empty() && indent(line) <= depth;
        let body = lines[1..].iter().position(is_after).unwrap_or(lines.len() - 1);
        return Some(body + 1);
    }
    if head.ends_with('}') || head.ends_with(';') {
        return None;
    }
    let is_end = |line: &&str| indent(line) == depth && line.trim_start().starts_with('}');
    lines[1..].iter().position(is_end).map(|end| end + 2)
}

fn check_unsafe(file: &Path, lines: &[&str], find: &mut impl FnMut(usize, String)) {
    let keyword = concat!("uns", "afe");
    let is_room = UNSAFE_ROOMS.iter().any(|room| file.starts_with(room));
    for (number, line) in lines.iter().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        let is_marked = [" {", " fn ", " impl ", " extern "]
            .iter()
            .any(|after| code.contains(&format!("{keyword}{after}")));
        if !is_marked {
            continue;
        }
        if !is_room {
            find(number, format!("{keyword} outside of {}", UNSAFE_ROOMS.join(", ")));
        }
        let is_block = code.contains(&format!("{keyword} {{"));
        if is_block && !has_reason(&lines[..=number]) {
            find(number, format!("{keyword} without `// SAFETY:`"));
        }
    }
}

/// True if the statement that the last of `lines` is in has a SAFETY comment on or before it.
fn has_reason(lines: &[&str]) -> bool {
    let mut before = lines.iter().rev().take(12);
    let is_boundary = |line: &str| line.is_empty() || line.ends_with(';') || line == "}";
    let reason = |line: &str| line.contains("SAFETY:");
    let Some(own) = before.next() else { return false };
    reason(own)
        || before
            .map(|line| line.trim())
            .take_while(|line| line.starts_with("//") || !is_boundary(line))
            .any(reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(name: &str, text: &str) -> Vec<String> {
        let mut findings = Vec::new();
        let file = Path::new(name);
        check(file, text, Language::of(file, text).unwrap(), &mut findings);
        findings.iter().map(Finding::to_string).collect()
    }

    #[test]
    fn a_function_of_71_lines_is_found_where_it_begins() {
        let text = |body: usize| format!("\nfn f() {{\n{}}}\n", "    g();\n".repeat(body));
        assert_eq!(findings("a.rs", &text(68)), [""; 0]);
        assert_eq!(findings("a.rs", &text(69)), ["a.rs:2: 71 lines in a function, 70 allowed"]);
        let python = format!("def f():\n{}\ng()\n", "    g()\n".repeat(70));
        assert_eq!(findings("a.py", &python).len(), 1);
    }

    #[test]
    fn long_lines_and_long_files_are_found() {
        assert_eq!(findings("a.rs", &"x".repeat(100)), [""; 0]);
        assert_eq!(findings("a.rs", &"x".repeat(101)).len(), 1);
        assert_eq!(findings("a.rs", &"\n".repeat(1001)).len(), 1);
    }

    #[test]
    fn code_without_safety_stays_in_its_rooms_and_gives_reasons() {
        let keyword = concat!("uns", "afe");
        let bare = format!("let a = {keyword} {{ f() }};\n");
        let argued = format!("// SAFETY: f is total.\nlet a = {keyword} {{ f() }};\n");
        assert_eq!(findings("crates/kernel/src/a.rs", &argued), [""; 0]);
        assert_eq!(findings("crates/kernel/src/a.rs", &bare).len(), 1);
        assert_eq!(findings("crates/node/src/a.rs", &argued).len(), 1);
    }

    #[test]
    fn unfinished_code_is_found() {
        assert_eq!(findings("a.rs", concat!("    todo", "!();")).len(), 1);
        assert_eq!(findings("tool", "#!/bin/sh\necho hello\n"), [""; 0]);
    }
}
