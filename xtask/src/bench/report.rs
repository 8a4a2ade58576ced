//! What a suite leaves behind: Markdown for docs/benchmarks.md, JSON and plots in a directory.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use hotspare_torture::lab::ground::{self, Ground, Pins};
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
    /// Minutes that a suite may take, more or less: fewer rounds, or shorter loads
    #[arg(long)]
    pub minutes: Option<f64>,
    /// Real hosts that `ssh` reaches as root, the first has the guest, the others are spares;
    /// clients run here. They get addresses in 10.77.0.0/24 for that time, on the interfaces
    /// between them and here
    #[arg(long, value_delimiter = ',', value_name = "A,B", conflicts_with = "pin")]
    pub hosts: Vec<String>,
    /// How hosts are reached, with its options
    #[arg(long, default_value = "ssh", value_name = "COMMAND")]
    pub ssh: String,
    /// Processors of client, guest, primary's and spare's agent, as in 0,1,2,3 or 0-1,2,3,3. By
    /// itself where there are four or more; `none` pins nothing
    #[arg(long, value_name = "CLIENT,GUEST,PRIMARY,SPARE")]
    pub pin: Option<String>,
}

impl Common {
    /// Where all labs of this program are: real hosts, or pinned ones on this machine.
    fn choose_ground(&self) -> Result<&'static Ground> {
        if !self.hosts.is_empty() {
            let ssh = self.ssh.split_ascii_whitespace().map(str::to_owned).collect();
            return Ok(ground::choose(Ground::Real { hosts: self.hosts.clone(), ssh }));
        }
        let here = ground::processors().context("read the processors of this program")?;
        let pins = match self.pin.as_deref() {
            None => Pins::of(&here),
            Some("none") => None,
            Some(said) => Some(Pins::parse(said, &here).map_err(anyhow::Error::msg)?),
        };
        Ok(ground::choose(Ground::Here(pins)))
    }

    /// The rounds of a suite, no more than `most`; says how long they take as soon as one is over.
    /// With `--minutes`, none begins that would not be over by then; `part` of it is for these.
    pub fn rounds(&self, what: &'static str, most: usize, part: f64) -> Rounds {
        let at_most = self.minutes.map(|minutes| Duration::from_secs_f64(minutes * 60.0 * part));
        Rounds { what, most, at_most, begun: Instant::now(), done: 0 }
    }

    /// Seconds that each of `count` loads can be measured, at most as wanted, where everything
    /// else takes `others_s`; says how long that will be.
    pub fn seconds(&self, what: &str, wanted: f64, count: f64, others_s: f64) -> f64 {
        let fitting = self.minutes.map(|minutes| (minutes * 60.0 - others_s) / count);
        let seconds = fitting.map_or(wanted, |fitting| fitting.clamp(wanted.min(1.0), wanted));
        let all = Duration::from_secs_f64(others_s + count * seconds);
        println!("{what}: {count:.0} loads of {seconds:.1} s, about {} in all", minutes(all));
        seconds
    }
}

/// Rounds of a suite, as an iterator over their numbers.
pub struct Rounds {
    what: &'static str,
    most: usize,
    at_most: Option<Duration>,
    begun: Instant,
    done: usize,
}

impl Iterator for Rounds {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let (done, took) = (self.done, self.begun.elapsed());
        let after = |rounds: usize| took.mul_f64(rounds as f64 / done.max(1) as f64);
        let fits = |rounds: &usize| self.at_most.is_none_or(|most| after(*rounds) <= most);
        let all = (1..=self.most).rev().find(fits).unwrap_or(1);
        if done == 1 {
            let (what, each) = (self.what, minutes(took));
            println!("{what}: a round took {each}; {all} rounds, {} in all", minutes(after(all)));
        }
        (done == 0 && self.most > 0 || done < all).then(|| {
            self.done += 1;
            done
        })
    }
}

fn minutes(span: Duration) -> String {
    match span.as_secs_f64() {
        seconds if seconds < 90.0 => format!("{seconds:.0} s"),
        seconds => format!("{:.0} min", seconds / 60.0),
    }
}

/// Everything that one run of a suite has measured.
pub struct Report {
    suite: &'static str,
    about: Provenance,
    common: Common,
    results: Vec<Value>,
    /// Single runs of results that are not whole.
    runs: Vec<Value>,
    plots: Vec<Plot>,
}

impl Report {
    /// Of a suite that begins now.
    pub fn new(suite: &'static str, common: &Common) -> Result<Report> {
        let about =
            Provenance { ground: common.choose_ground()?.to_string(), ..Provenance::now()? };
        Ok(Report {
            suite,
            about,
            common: common.clone(),
            results: vec![],
            runs: vec![],
            plots: vec![],
        })
    }

    /// Keeps what was measured of something, with every digit.
    pub fn add(&mut self, of: Value, measured: &impl Serialize) -> Result<()> {
        let measured = serde_json::to_value(measured).context("write JSON")?;
        self.results.push(json!({ "of": of, "measured": measured }));
        Ok(())
    }

    /// Keeps a run of what is measured more than once, until all of it is added: a suite that fails
    /// after an hour leaves what it has measured by then.
    pub fn note(&mut self, of: Value, run: &impl Serialize) -> Result<()> {
        let run = serde_json::to_value(run).context("write JSON")?;
        self.runs.push(json!({ "of": of, "run": run }));
        Ok(())
    }

    /// Keeps a plot.
    pub fn plot(&mut self, plot: Plot) {
        self.plots.push(plot);
    }

    /// Writes JSON and plots, and `text` with where it comes from between the marks of `place` in
    /// docs/benchmarks.md, if wanted.
    pub fn finish(mut self, place: &str, text: &str) -> Result<()> {
        let name = place.replace(' ', "-");
        self.runs.clear();
        let results = std::mem::take(&mut self.results);
        let dir = self.keep(&name, &results)?;
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

    /// Writes what was measured as JSON; says where.
    fn keep(&self, name: &str, results: &[Value]) -> Result<PathBuf> {
        let dir = self.dir();
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        let all = json!({ "suite": self.suite, "about": self.about, "results": results });
        let path = dir.join(format!("{name}.json"));
        let all = serde_json::to_string_pretty(&all).context("write JSON")?;
        fs::write(&path, all + "\n").with_context(|| format!("write {}", path.display()))?;
        Ok(dir)
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

/// What [`Report::finish`] has not written.
impl Drop for Report {
    fn drop(&mut self) {
        let mut results = std::mem::take(&mut self.results);
        results.append(&mut self.runs);
        if results.is_empty() {
            return;
        }
        let name = format!("{}-unfinished", self.suite);
        match self.keep(&name, &results) {
            Ok(dir) => println!("\nwhat was measured so far: {}/{name}.json", dir.display()),
            Err(error) => println!("\nwhat was measured so far is lost: {error:#}"),
        }
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
    /// Which hosts, and what is pinned where.
    ground: String,
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
            ground: String::new(),
        })
    }

    fn text(&self) -> String {
        let made = format!(
            "{}, commit {}, {} × {}, {} GiB, Linux {}, {}, load average {:.1} before it began.",
            self.date,
            self.commit,
            self.processors,
            self.processor,
            self.memory_gib,
            self.kernel,
            self.ground,
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
    fn a_suite_that_fails_leaves_what_it_has_measured() {
        let common = Common { quick: true, ..Common::default() };
        let report = |suite| -> Report {
            let about = Provenance::now().unwrap();
            let (results, runs, plots) = Default::default();
            Report { suite, about, common: common.clone(), results, runs, plots }
        };
        let left = |name: &str| {
            let path = tree::target().join("bench-quick").join(name);
            let text = fs::read_to_string(&path).ok()?;
            fs::remove_file(path).unwrap();
            Some(serde_json::from_str::<Value>(&text).unwrap()["results"].clone())
        };
        let (added, noted) = (json!({ "of": "a", "measured": 1 }), json!({ "of": "b", "run": 2 }));
        let mut fails = report("test-fails");
        fails.add(json!("a"), &1).unwrap();
        fails.note(json!("b"), &2).unwrap();
        drop(fails);
        assert_eq!(left("test-fails-unfinished.json"), Some(json!([added, noted])));
        let mut ends = report("test-ends");
        ends.note(json!("b"), &2).unwrap();
        ends.add(json!("a"), &1).unwrap();
        ends.finish("test-ends", "").unwrap();
        assert_eq!(left("test-ends.json"), Some(json!([added])));
        assert_eq!(left("test-ends-unfinished.json"), None);
    }

    #[test]
    fn long_lines_are_broken_between_words() {
        let text = wrapped(&"a word ".repeat(40));
        assert!(text.lines().all(|line| line.len() <= 100) && text.lines().count() == 3);
        assert_eq!(text.split_whitespace().count(), 80);
        assert_eq!(wrapped("short"), "short\n");
    }

    #[test]
    fn rounds_end_when_the_next_would_be_late() {
        let rounds = |most, at_most: Option<u64>| {
            let begun = Instant::now() - Duration::from_secs(60);
            let at_most = at_most.map(Duration::from_secs);
            // Two are over: 30 s each.
            Rounds { what: "x", most, at_most, begun, done: 2 }
        };
        assert_eq!(rounds(3, None).next(), Some(2));
        assert_eq!(rounds(2, None).next(), None);
        assert_eq!(rounds(5, Some(100)).next(), Some(2));
        assert_eq!(rounds(5, Some(80)).next(), None);
        // One there is in any case.
        assert_eq!(Rounds { done: 0, ..rounds(5, Some(1)) }.next(), Some(0));
    }

    #[test]
    fn loads_get_shorter_to_fit() {
        let common = |minutes| Common { minutes, ..Common::default() };
        assert_eq!(common(None).seconds("x", 5.0, 100.0, 60.0), 5.0);
        assert_eq!(common(Some(6.0)).seconds("x", 5.0, 100.0, 60.0), 3.0);
        assert_eq!(common(Some(1.0)).seconds("x", 5.0, 100.0, 60.0), 1.0);
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
