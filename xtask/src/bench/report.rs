//! What a suite leaves behind: Markdown for docs/benchmarks.md, JSON and plots in a directory.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};

use super::plot::Plot;
use crate::tree;

/// What all suites can be told.
#[derive(Clone, Debug, Default, Args)]
pub struct Common {
    /// Puts tables and plots into docs
    #[arg(long)]
    pub write: bool,
    /// As short and small as can be: shows that it runs
    #[arg(long, conflicts_with = "write")]
    pub quick: bool,
    /// Compares with another commit of this repository, in turns
    #[arg(long, value_name = "REV", conflicts_with_all = ["write", "quick"])]
    pub against: Option<String>,
    /// How often each commit has its turn
    #[arg(long, default_value_t = 10)]
    pub turns: usize,
}

/// Everything that one run of a suite has measured.
pub struct Report {
    suite: &'static str,
    about: Provenance,
    common: Common,
    results: Vec<Value>,
    plots: Vec<Plot>,
}

impl Report {
    /// Of a suite that begins now.
    pub fn new(suite: &'static str, common: &Common) -> Result<Report> {
        let about = Provenance::now()?;
        Ok(Report { suite, about, common: common.clone(), results: vec![], plots: vec![] })
    }

    /// Keeps what was measured of something, with every digit.
    pub fn add(&mut self, of: Value, measured: &impl Serialize) -> Result<()> {
        let measured = serde_json::to_value(measured).context("write JSON")?;
        self.results.push(json!({ "of": of, "measured": measured }));
        Ok(())
    }

    /// Keeps a plot.
    pub fn plot(&mut self, plot: Plot) {
        self.plots.push(plot);
    }

    /// Writes JSON and plots, and `text` with where it comes from between the marks of `place` in
    /// docs/benchmarks.md, if wanted.
    pub fn finish(self, place: &str, text: &str) -> Result<()> {
        let dir = self.dir();
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        let name = place.replace(' ', "-");
        let all = json!({
            "suite": self.suite, "about": self.about, "results": self.results,
        });
        let path = dir.join(format!("{name}.json"));
        let all = serde_json::to_string_pretty(&all).context("write JSON")?;
        fs::write(&path, all + "\n").with_context(|| format!("write {}", path.display()))?;
        let mut text = format!("{}\n{text}", self.about.text());
        for plot in &self.plots {
            let file = format!("{name}-{}.svg", plot.name);
            plot.draw(&dir.join(&file))?;
            if self.common.write {
                let docs = tree::root().join("docs/plots");
                fs::create_dir_all(&docs).context("make docs/plots")?;
                fs::copy(dir.join(&file), docs.join(&file)).context("write docs/plots")?;
            }
            text.push_str(&format!("\n![{}](plots/{file})\n", plot.title));
        }
        println!("\nresults: {}", dir.display());
        finish(place, &text, self.common.write)
    }

    /// `bench/results/DATE-HOST-KERNEL`; what shows only that it runs stays in `target`.
    fn dir(&self) -> PathBuf {
        if self.common.quick {
            return tree::target().join("bench-quick");
        }
        let Provenance { date, host, kernel, .. } = &self.about;
        let day = date.split(' ').next().unwrap_or_default();
        tree::root().join("bench/results").join(format!("{day}-{host}-{kernel}"))
    }
}

/// When, where and of what.
#[derive(Clone, Debug, Serialize)]
pub struct Provenance {
    date: String,
    commit: String,
    command: String,
    host: String,
    kernel: String,
    /// Measured instead of the program of this tree (`$HOTSPARE_BIN`).
    program: Option<String>,
    processor: String,
    processors: usize,
    memory_gib: u64,
    /// Of the last minute, before the suite began: what else was running.
    load: f64,
}

impl Provenance {
    fn now() -> Result<Provenance> {
        let said = |program: &str, arguments: &[&str]| -> Result<String> {
            let output = Command::new(program).args(arguments).output();
            let output = output.with_context(|| format!("run {program}"))?;
            ensure!(output.status.success(), "{program} {arguments:?}: {}", output.status);
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        };
        let read = |path: &str| {
            fs::read_to_string(path).map(|text| text.trim().to_owned()).context(path.to_owned())
        };
        let root = tree::root().to_string_lossy();
        let cpus = read("/proc/cpuinfo")?;
        let models = cpus.lines().filter(|line| line.starts_with("model name"));
        let model = models.clone().next().and_then(|line| line.split_once(": "));
        let memory = read("/proc/meminfo")?;
        let kib = memory.split_ascii_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
        let load = read("/proc/loadavg")?;
        let load = load.split(' ').next().and_then(|load| load.parse().ok());
        let words: Vec<String> = std::env::args().skip(1).collect();
        Ok(Provenance {
            date: said("date", &["-u", "+%F %H:%M UTC"])?,
            commit: said("git", &["-C", &root, "describe", "--always", "--dirty"])?,
            command: format!("cargo xtask {}", words.join(" ")),
            host: read("/proc/sys/kernel/hostname")?,
            kernel: read("/proc/sys/kernel/osrelease")?,
            program: std::env::var("HOTSPARE_BIN").ok(),
            processor: model.map_or("unknown processor", |(_, name)| name).to_owned(),
            processors: models.count(),
            memory_gib: kib.unwrap_or_default().div_ceil(1 << 20),
            load: load.unwrap_or_default(),
        })
    }

    fn text(&self) -> String {
        let made = format!(
            "{}, commit {}, {} × {}, {} GiB, Linux {}, all hosts on one machine, nothing pinned, \
             load average {:.1} before it began.",
            self.date,
            self.commit,
            self.processors,
            self.processor,
            self.memory_gib,
            self.kernel,
            self.load
        );
        let other = self.program.as_ref().map(|path| format!(" The program is {path}."));
        let made = made + other.as_deref().unwrap_or_default();
        format!("{}`{}`\n", wrapped(&made), self.command)
    }
}

/// A table in Markdown that is also shown row by row while it grows.
pub struct Table {
    pub text: String,
    is_quiet: bool,
}

impl Table {
    pub fn new(names: &[&str]) -> Self {
        Self::with(names, false)
    }

    /// One that is shown when it is whole.
    pub fn quiet(names: &[&str]) -> Self {
        Self::with(names, true)
    }

    fn with(names: &[&str], is_quiet: bool) -> Self {
        let mut table = Self { text: String::new(), is_quiet };
        table.row(names.iter().map(ToString::to_string));
        table.row(names.iter().map(|_| "---".to_owned()));
        table
    }

    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<String> = cells.into_iter().collect();
        let row = format!("| {} |", cells.join(" | "));
        if !self.is_quiet {
            println!("{row}");
        }
        self.text.push_str(&row);
        self.text.push('\n');
    }
}

/// Text in lines of at most 100 columns.
pub fn wrapped(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last =
            lines.last_mut().filter(|line| line.chars().count() + word.chars().count() < 100);
        match last {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) => line.extend([" ", word]),
            None => lines.push(word.to_owned()),
        }
    }
    lines.join("\n") + "\n"
}

/// Puts `text` between the marks of `name` in docs/benchmarks.md, if wanted.
fn finish(name: &str, text: &str, write: bool) -> Result<()> {
    if !write {
        return Ok(());
    }
    let path = tree::root().join("docs/benchmarks.md");
    let page = fs::read_to_string(&path).context("read docs/benchmarks.md")?;
    let page = between(&page, name, text).with_context(|| format!("no marks of {name}"))?;
    fs::write(path, page).context("write docs/benchmarks.md")
}

fn between(page: &str, name: &str, text: &str) -> Option<String> {
    let (first, last) = (format!("<!-- bench {name} -->"), format!("<!-- end {name} -->"));
    let (before, rest) = page.split_once(&first)?;
    let (_, after) = rest.split_once(&last)?;
    Some(format!("{before}{first}\n\n{text}\n{last}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_between_words() {
        let text = wrapped(&"a word ".repeat(40));
        assert!(text.lines().all(|line| line.len() <= 100) && text.lines().count() == 3);
        assert_eq!(text.split_whitespace().count(), 80);
        assert_eq!(wrapped("short"), "short\n");
    }

    #[test]
    fn a_table_takes_the_place_of_the_one_before() {
        let page = "a\n<!-- bench x -->\nold\n<!-- end x -->\nb";
        let new = between(page, "x", "new\n").unwrap();
        assert_eq!(new, "a\n<!-- bench x -->\n\nnew\n\n<!-- end x -->\nb");
        assert_eq!(between(&new, "x", "new\n").unwrap(), new);
        assert_eq!(between(page, "y", "new"), None);
    }
}
