//! `cargo xtask bench restart`: FREM's tables, over the road that users take: `hotspare run
//! --store`, the death of its host, `hotspare restore` on another one at the end of a line.

mod line;
mod programs;
mod reply;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hotspare_torture::bench::Spread;
use hotspare_torture::lab::{Host, LAB_DIR, Lab, Process};
use nix::sys::signal::Signal;
use serde::Serialize;
use serde_json::{Value, json};

use self::line::Line;
use self::programs::{Program, Workshop};
pub use self::reply::{NAME, ReplyArguments, record_writes, replies};
use super::against::{Case, Figures, compare};
use super::plot::{Axis, Curve, Panel, Plot};
use super::report::{Common, Report, Table, wrapped};
use crate::pool::side_by_side;
use crate::tree;

/// The store's place below what the line serves.
const PLACE: &str = "p";
const PATIENCE: Duration = Duration::from_secs(300);
/// When a restored guest starts.
const STARTS: [(&str, &[&str]); 4] = [
    ("loaded", &["--load-first"]),
    ("touched", &["--start", "touched"]),
    ("smooth", &["--start", "smooth"]),
    ("early", &["--start", "early"]),
];

#[derive(Debug, Args)]
pub struct RestartArguments {
    #[command(flatten)]
    common: Common,
    /// Programs; all if none is given
    #[arg(long, value_delimiter = ',')]
    programs: Vec<String>,
    /// Lines: megabytes a second, and milliseconds of a round trip
    #[arg(long, value_delimiter = ',', default_value = "32:70,7:200")]
    lines: Vec<String>,
    /// Seconds that a program has run before its last checkpoint
    #[arg(long, default_value_t = 12)]
    warm: u64,
    /// Restarts of each kind, in turns
    #[arg(long, default_value_t = 20)]
    count: usize,
    /// Programs that restart at once, each at the end of a line of its own [default: as many as
    /// have 32 MB/s together, four at most]
    #[arg(long)]
    jobs: Option<usize>,
    /// Another hotspare program that restores from the same checkpoints, in turns with this one
    #[arg(long)]
    beside: Option<PathBuf>,
}

/// Megabytes a second, and the round trip.
type Speed = (u64, Duration);

/// Restarts that wait for slow lines leave the processors to others: so many may be at work at
/// once, each at a line of its own, without more coming in than by one line of the fast kind.
fn at_once((rate, _): Speed) -> usize {
    (32 / rate.max(1)).clamp(1, 4) as usize
}

const SEVERAL: &str = "At a slow line several restarts are under way at once, each at a line of \
    its own: as many as have 32 MB/s together, four at most.";

fn speeds(lines: &[String]) -> Result<Vec<Speed>> {
    let speed = |line: &String| {
        let (rate, delay) = line.split_once(':').context("a line is written 32:70")?;
        Ok((rate.parse()?, Duration::from_millis(delay.parse()?)))
    };
    lines.iter().map(speed).collect()
}

impl RestartArguments {
    pub fn with(common: Common) -> RestartArguments {
        let lines = ["32:70", "7:200"].map(str::to_owned).into();
        let (programs, beside) = (vec![], None);
        RestartArguments { common, programs, lines, warm: 12, count: 20, jobs: None, beside }
    }

    fn wants(&self, name: &str) -> bool {
        match self.common.quick {
            true => name == "perl",
            false => self.programs.is_empty() || self.programs.iter().any(|wanted| wanted == name),
        }
    }

    fn chosen(&self) -> Result<Vec<Program>> {
        let workshop = Workshop::open(|name| self.wants(name))?;
        let programs = workshop.programs().into_iter();
        let chosen: Vec<Program> = programs.filter(|program| self.wants(program.name)).collect();
        ensure!(!chosen.is_empty(), "there is no program {:?}", self.programs);
        Ok(chosen)
    }

    fn speeds(&self) -> Result<Vec<Speed>> {
        if self.common.quick {
            return Ok(vec![(200, Duration::from_millis(1))]);
        }
        speeds(&self.lines)
    }

    fn record(&self, hotspare: &Path, program: &Program) -> Result<Recorded> {
        let (warm, track) = if self.common.quick { (1, "1s") } else { (self.warm, "5s") };
        let warm = Duration::from_secs(warm);
        let program = (program.name, &program.command[..]);
        Recorded::make(hotspare, program, &["--track", track], |_, primary| {
            let deadline = Instant::now() + warm;
            while Instant::now() < deadline {
                if let Some(status) = primary.try_wait() {
                    bail!("it ended with {status}");
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            Ok(())
        })
    }

    fn count(&self) -> usize {
        if self.common.quick { 1 } else { self.count.max(1) }
    }

    fn about(&self) -> String {
        let at_once = match self.jobs {
            None => SEVERAL.to_owned(),
            Some(jobs) => format!("{jobs} programs at once, each at a line of its own."),
        };
        let count = self.count();
        format!(
            "{ABOUT} Each kind {count} times, in turns; where nothing else is said, what is told \
             of a kind is of the run in the middle, \"all there\" the median. {at_once}"
        )
    }

    /// Restarts all programs, each kind in turns: what became of each kind of each program.
    fn rounds(&self, all: &[Recorded], speed: Speed) -> Vec<Result<Vec<Kind>>> {
        let places: Vec<_> = all.iter().map(|recorded| (recorded, OnceLock::new())).collect();
        side_by_side(self.jobs.unwrap_or(at_once(speed)), &places, |(recorded, place)| {
            let begun = Instant::now();
            let went = self.rounds_of(recorded, speed);
            println!("{}: {:.0} s", recorded.name, begun.elapsed().as_secs_f64());
            place.get_or_init(|| went.with_context(|| format!("restart {}", recorded.name)));
        });
        let each = places.into_iter().map(|(_, place)| place.into_inner());
        each.map(|went| went.context("not restarted").flatten()).collect()
    }

    fn rounds_of(&self, recorded: &Recorded, speed: Speed) -> Result<Vec<Kind>> {
        let own = STARTS.iter().map(|(_, how)| (&recorded.hotspare, *how));
        let beside = self.beside.iter().flat_map(|other| BESIDE.map(|how| (other, STARTS[how].1)));
        let kinds: Vec<(&PathBuf, &[&str])> = own.chain(beside).collect();
        let mut all = vec![Vec::new(); kinds.len()];
        for _ in 0..self.count() {
            for (kind, (hotspare, how)) in all.iter_mut().zip(&kinds) {
                kind.push(recorded.restart(hotspare, how, speed)?);
            }
        }
        Ok(all.into_iter().map(Kind::of).collect())
    }
}

/// How one restart went.
#[derive(Clone, Debug, Default, Serialize)]
struct Restart {
    latency_s: f64,
    before_mb: f64,
    behind_mb: f64,
    /// Until all of it was there.
    whole_s: f64,
    behind_s: f64,
    waited_s: f64,
    unforeseen: u64,
    requests: u64,
    /// What of the latency was spent on what, in milliseconds.
    parts_ms: Vec<(String, f64)>,
}

/// All restarts of one kind.
#[derive(Debug, Serialize)]
struct Kind {
    /// The one in the middle, by latency.
    middle: Restart,
    latency_s: Spread,
    whole_s: Spread,
}

impl Kind {
    fn of(mut went: Vec<Restart>) -> Self {
        went.sort_by(|a, b| a.latency_s.total_cmp(&b.latency_s));
        let spread = |of: fn(&Restart) -> f64| Spread::of(went.iter().map(of).collect());
        let latency_s = spread(|restart| restart.latency_s);
        let whole_s = spread(|restart| restart.whole_s);
        Self { middle: went.swap_remove(went.len() / 2), latency_s, whole_s }
    }

    fn cell(&self) -> String {
        format!("{:.2} / {:.2}", self.latency_s.p50, self.latency_s.p99)
    }
}

/// What became of a program: of each kind, and what the early start saved.
type Went = (&'static str, Vec<Kind>, f64);

/// Of [`STARTS`], those that another program is compared by.
const BESIDE: [usize; 2] = [0, 3];

const BESIDE_COLUMNS: [&str; 6] =
    ["program", "all first s", "early s", "other: all first s", "other: early s", "all there s"];

const COLUMNS: [&str; 14] = [
    "program",
    "image MB",
    "all first s p50 / p99",
    "touch set first MB",
    "s p50 / p99",
    "smooth s p50 / p99",
    "early MB",
    "s p50 / p99",
    "saved",
    "all there s",
    "waited for s",
    "of the overlap",
    "unforeseen pages",
    "requests",
];

const TRACKING: [&str; 6] =
    ["program", "windows", "window s", "clearing ms", "looking ms", "of the window"];

/// Stores, kills and restores each program, and shows what it took.
pub fn restarts(arguments: &RestartArguments) -> Result<()> {
    let (programs, speeds) = (arguments.chosen()?, arguments.speeds()?);
    if let Some(rev) = &arguments.common.against {
        let cases = cases(arguments, &programs, &speeds);
        return compare("restart", &arguments.common, rev, &cases);
    }
    let hotspare = tree::build_hotspare()?;
    let mut report = Report::new("restart", &arguments.common)?;
    let mut recorded = Vec::new();
    for program in &programs {
        recorded.push(arguments.record(&hotspare, program)?);
    }
    let mut text = wrapped(&arguments.about()) + &tracked(&recorded, &mut report)?;
    let mut panels = Vec::new();
    for speed in speeds {
        let (rate, delay_ms) = (speed.0, speed.1.as_millis() as u64);
        let named = format!("{rate} MB/s, {delay_ms} ms");
        println!("\n{named}:\n");
        let went = arguments.rounds(&recorded, speed);
        let mut table = Table::new(&COLUMNS);
        let mut all = Vec::new();
        for (recorded, went) in recorded.iter().zip(went) {
            // What came before an error is in the report by then.
            let went = went?;
            let others = BESIDE.map(|at| (STARTS[at].0, true));
            let kinds = STARTS.iter().map(|start| (start.0, false)).chain(others);
            for ((start, is_other), restart) in kinds.zip(&went) {
                let of = json!({ "program": recorded.name, "start": start, "mb_per_s": rate,
                    "round_trip_ms": delay_ms, "other": is_other });
                report.add(of, restart)?;
            }
            let saved = row(&mut table, recorded.name, &went);
            all.push((recorded.name, went, saved));
        }
        let mean = all.iter().map(|one| one.2).sum::<f64>() / all.len() as f64;
        let mean = format!("On average {mean:.0} % less than with everything first.");
        println!("\n{mean}\n");
        text += &format!("\n{named}:\n\n{}\n{mean}\n\n{}", table.text, parts(&all));
        text += &beside(&all);
        panels.push(panel(&named, &all));
    }
    report.plot(Plot {
        name: "programs".to_owned(),
        title: "How long programs take until they run again".to_owned(),
        about: "from the start of `hotspare restore` on; lines by bandwidth and round trip"
            .to_owned(),
        panels,
    });
    report.finish("restart", &text)
}

/// What the guest waited for, of an early start.
fn parts(all: &[Went]) -> String {
    fn early(one: &Went) -> Option<&Restart> {
        one.1.get(3).map(|kind| &kind.middle)
    }
    let first = all.first().and_then(early).filter(|first| !first.parts_ms.is_empty());
    let Some(first) = first else { return String::new() };
    let names: Vec<String> = first.parts_ms.iter().map(|(part, _)| format!("{part} ms")).collect();
    let columns: Vec<&str> =
        std::iter::once("program").chain(names.iter().map(String::as_str)).collect();
    let mut table = Table::new(&columns);
    for (name, restart) in all.iter().filter_map(|one| Some((one.0, early(one)?))) {
        let each = restart.parts_ms.iter().map(|(_, ms)| format!("{ms:.0}"));
        table.row(std::iter::once(name.to_owned()).chain(each));
    }
    println!();
    table.text
}

/// The same by another program, if there was one.
fn beside(all: &[Went]) -> String {
    let mut table = None;
    for (name, went, _) in all {
        let [own, _, _, early, other, other_early] = &went[..] else { continue };
        let table = table.get_or_insert_with(|| Table::new(&BESIDE_COLUMNS));
        let each = [own, early, other, other_early].map(Kind::cell);
        let last = format!("{:.2}", other_early.whole_s.p50);
        table.row(std::iter::once((*name).to_owned()).chain(each).chain([last]));
    }
    println!();
    table.map_or_else(String::new, |table| format!("\n{}", table.text))
}

/// What tracking took of each program.
fn tracked(all: &[Recorded], report: &mut Report) -> Result<String> {
    println!();
    let mut table = Table::new(&TRACKING);
    for recorded in all {
        let tracking = &recorded.tracking;
        let ms = tracking.clearing_ms + tracking.looking_ms;
        report.add(json!({ "program": recorded.name, "tracking": true }), tracking)?;
        table.row([
            recorded.name.to_owned(),
            tracking.windows.to_string(),
            format!("{:.2}", tracking.window_ms / 1e3),
            format!("{:.2}", tracking.clearing_ms),
            format!("{:.2}", tracking.looking_ms),
            format!("{:.2} %", 100.0 * ms / tracking.window_ms.max(1.0)),
        ]);
    }
    Ok(format!("\n{}\n{}", wrapped(ABOUT_TRACKING), table.text))
}

/// One place for each program.
fn panel(line: &str, all: &[Went]) -> Panel {
    let names: Vec<String> = all.iter().map(|one| one.0.to_owned()).collect();
    let points = |start: usize| {
        let places = all.iter().enumerate();
        places.map(|(place, one)| (place as f64, one.1[start].latency_s.p50)).collect()
    };
    let each = STARTS.iter().enumerate();
    let curves =
        each.map(|(start, (name, _))| Curve { name: (*name).to_owned(), points: points(start) });
    let (x, y) = (Axis::names("program", &names), Axis::linear(&format!("{line}: s")));
    Panel { x, y, curves: curves.collect() }
}

/// As `restore` does it without being told how, so that commits from before can be measured.
fn cases<'a>(
    arguments: &'a RestartArguments,
    programs: &'a [Program],
    speeds: &[Speed],
) -> Vec<Case<'a>> {
    let pairs =
        speeds.iter().flat_map(|speed| programs.iter().map(move |program| (*speed, program)));
    let case = |(speed, program): (Speed, &'a Program)| Case {
        name: format!("{}, {} MB/s, {} ms", program.name, speed.0, speed.1.as_millis()),
        measure: Box::new(move |hotspare: &Path| {
            let restart = arguments.record(hotspare, program)?.restart(hotspare, &[], speed)?;
            Ok(Figures::from([("until it runs s".to_owned(), restart.latency_s)]))
        }),
    };
    pairs.map(case).collect()
}

const ABOUT: &str = "A program runs under `hotspare run --store` for some seconds, its host dies, \
    and `hotspare restore` brings it back on another one that reads the store at the end of a line \
    of that bandwidth and round trip (a server of S3's dialect that delays each answer by a round \
    trip and sends all of them one after another; connections are there at once; what is sent is \
    compressed). Image: private memory of the guest that is not zero. Times are until the program \
    runs, from the start of `restore` on: with everything there (`--load-first`), with the touch \
    set (`--start touched`, as FREM does), with as much as is needed so that, at the measured \
    bandwidth, nothing comes later than it was touched (`smooth`), and with what was touched in \
    the first moments (`early`, what `restore` does). What follows is of `early`; saved is against \
    all first. All there: the rest of the memory has come behind it, to be compared with all \
    first. Waited for: pages that were not there yet, all together, each by whoever came first; \
    of the overlap: what that is of the time from its start until all is there, so of a program \
    with one thread how much slower it was. Unforeseen: pages that were waited for and not even \
    asked for.";

const ABOUT_TRACKING: &str = "Tracking what is touched, while the program runs and is stored: \
    means of all windows of the recording, in processor time. Clearing the notes holds the address \
    space's lock, so that a page fault may wait for it; looking is beside the program. Of the \
    window: both, of one processor.";

fn row(table: &mut Table, name: &str, went: &[Kind]) -> f64 {
    let [all, touched, smooth, kind, ..] = went else { return 0.0 };
    let saved = 100.0 - 100.0 * kind.latency_s.p50 / all.latency_s.p50;
    let (image, early) = (&all.middle, &kind.middle);
    table.row([
        name.to_owned(),
        format!("{:.1}", image.before_mb + image.behind_mb),
        all.cell(),
        format!("{:.1}", touched.middle.before_mb),
        touched.cell(),
        smooth.cell(),
        format!("{:.1}", early.before_mb),
        kind.cell(),
        format!("{saved:.0} %"),
        format!("{:.2}", kind.whole_s.p50),
        format!("{:.2}", early.waited_s),
        format!("{:.0} %", 100.0 * early.waited_s / early.behind_s.max(0.01)),
        early.unforeseen.to_string(),
        early.requests.to_string(),
    ]);
    saved
}

/// What tracking took, for each window.
#[derive(Clone, Debug, Default, Serialize)]
struct Tracking {
    windows: usize,
    window_ms: f64,
    clearing_ms: f64,
    looking_ms: f64,
}

impl Tracking {
    fn of(primary: &Process) -> Self {
        let lines = primary.stdout().lines().into_iter();
        let told = lines.filter_map(|line| serde_json::from_str::<Value>(&line.text).ok());
        let told: Vec<Value> = told.filter(|told| told["event"] == "tracked").collect();
        let mean = |name: &str| {
            let each = told.iter().filter_map(|told| told[name].as_f64());
            each.sum::<f64>() / told.len().max(1) as f64
        };
        let (window_ms, clearing_ms) = (mean("window_ms"), mean("clearing_ms"));
        Self { windows: told.len(), window_ms, clearing_ms, looking_ms: mean("looking_ms") }
    }
}

/// A program's checkpoints, in a directory, and where it is restored.
struct Recorded {
    hotspare: PathBuf,
    name: &'static str,
    lab: Lab,
    served: PathBuf,
    tracking: Tracking,
}

impl Recorded {
    /// Runs it, stored, for as long as `meanwhile` takes, and until it is known what it touches.
    fn make(
        hotspare: &Path,
        (name, program): (&'static str, &[String]),
        more: &[&str],
        meanwhile: impl FnOnce(&Lab, &Process) -> Result<()>,
    ) -> Result<Self> {
        let lab = Lab::new(2)?;
        let store = format!("file://{LAB_DIR}/served/{PLACE}");
        let mut command = Command::new(hotspare);
        command.args(["run", "--json", "--insecure", "--guest", name, "--store", &store]);
        command.args(["--keep", "1h"]).args(more);
        if !more.contains(&"--store-every") {
            command.args(["--store-every", "1s"]);
        }
        command.arg("--").args(program);
        let primary = lab.host(0).spawn(&mut command)?;
        meanwhile(&lab, &primary).with_context(|| format!("{name}:\n{}", primary.said()))?;
        let served = lab.host(0).outside(format!("{LAB_DIR}/served"));
        let touched = served.join(format!("{PLACE}/{name}/touched"));
        let deadline = Instant::now() + PATIENCE;
        while !touched.exists() {
            if Instant::now() > deadline {
                bail!("nothing is known of what {name} touches:\n{}", primary.said());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        kill(&primary)?;
        let tracking = Tracking::of(&primary);
        Ok(Self { hotspare: hotspare.to_owned(), name, lab, served, tracking })
    }

    /// The same checkpoints, to be restored on other hosts.
    fn elsewhere(&self) -> Result<Self> {
        let (hotspare, served) = (self.hotspare.clone(), self.served.clone());
        let (lab, tracking) = (Lab::new(2)?, self.tracking.clone());
        Ok(Self { hotspare, name: self.name, lab, served, tracking })
    }

    /// Begins to restore it at the end of a line.
    fn begin(
        &self,
        hotspare: &Path,
        how: &[&str],
        (rate, delay): Speed,
    ) -> Result<(Process, Arc<Line>)> {
        let (host, line) = (self.lab.host(1), Arc::new(Line::new(rate, delay)));
        let listener = host.inside(|| TcpListener::bind(("127.0.0.1", 0)))?;
        let port = listener.local_addr()?.port();
        let (answers, served) = (line.clone(), self.served.clone());
        std::thread::spawn(move || line::serve(&listener, &served, &answers));
        let from = format!("s3://b/{PLACE}?endpoint=http://127.0.0.1:{port}&region=us-east-1");
        let mut command = Command::new(hotspare);
        command.env("AWS_ACCESS_KEY_ID", "x").env("AWS_SECRET_ACCESS_KEY", "x");
        command.args(["restore", "--json", "--insecure"]).args(how).args([&from, self.name]);
        Ok((host.spawn(&mut command)?, line))
    }

    fn restart(&self, hotspare: &Path, how: &[&str], speed: Speed) -> Result<Restart> {
        let (restored, line) = self.begin(hotspare, how, speed)?;
        let restart = went(self.lab.host(1), &restored, &line)?;
        kill(&restored)?;
        Ok(restart)
    }
}

/// What a restart came to, when all its memory is there.
fn went(host: &Host, restored: &Process, line: &Line) -> Result<Restart> {
    let started = told(host, restored, "restored")?;
    let loaded = told(host, restored, "loaded")?;
    let number = |told: &Value, name: &str| told[name].as_f64().unwrap_or_default();
    let megabytes = |bytes: f64| bytes / f64::from(1 << 20);
    let latency_s = number(&started, "took_ms") / 1e3;
    let behind_s = number(&loaded, "seconds") - number(&loaded, "before_seconds");
    Ok(Restart {
        latency_s,
        before_mb: megabytes(number(&loaded, "bytes_before")),
        behind_mb: megabytes(number(&loaded, "bytes_behind")),
        whole_s: latency_s + behind_s,
        behind_s,
        waited_s: number(&loaded, "waited_seconds"),
        unforeseen: loaded["unforeseen"].as_u64().unwrap_or_default(),
        requests: line.requests.load(Ordering::Relaxed),
        parts_ms: serde_json::from_value(started["parts_ms"].clone()).unwrap_or_default(),
    })
}

/// Waits until the agent says so.
fn told(host: &Host, process: &Process, event: &str) -> Result<Value> {
    let found = process.stdout().find(PATIENCE, |line| {
        let told = serde_json::from_str::<Value>(&line.text).ok()?;
        (told["event"] == event).then_some(told)
    });
    found.with_context(|| format!("{}: no {event}:\n{}", host.name(), process.said()))
}

fn kill(process: &Process) -> Result<()> {
    process.signal(Signal::SIGKILL)?;
    process.wait(PATIENCE)?;
    Ok(())
}
