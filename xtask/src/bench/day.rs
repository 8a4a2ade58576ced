//! `cargo xtask bench day`: a day of checkpoints in the store, in accelerated time: how large it
//! gets, and what it costs.
//!
//! The checkpoints of a real Redis are recorded for a while, and stored again and again, with the
//! times of a day, by the code that stores them in earnest.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use hotspare_image::memory::PAGE_BYTES;
use hotspare_image::source::{Block, BlockContent, PageSource, Span};
use hotspare_image::touch::TouchSet;
use hotspare_image::{Checkpoint, Epoch, Position, Term};
use hotspare_store::{
    About, Address, Base, Catalogue, Gatherer, Keep, Name, Requests, Store, Writer,
};
use serde::Serialize;
use serde_json::json;

use super::plot::{Axis, Curve, Panel, Plot};
use super::report::{Common, Report, Table, wrapped};
use super::restart::{NAME, record_writes};
use crate::tree;

/// How often the primary looks at chains, deletes, and reads the list (`stored/upload.rs`).
const TIDY: Duration = Duration::from_secs(60);
/// How often what is touched is tracked, `--track`.
const TRACK: Duration = Duration::from_secs(60);
/// Points of a curve.
const SAMPLE: Duration = Duration::from_secs(600);
/// Dollars of S3 Standard: a thousand PUT or LIST, a thousand GET or HEAD, a GB for a month.
const PUTS: f64 = 0.005;
const GETS: f64 = 0.0004;
const GB_MONTH: f64 = 0.023;

#[derive(Debug, Args)]
pub struct DayArguments {
    #[command(flatten)]
    common: Common,
    /// Keys of the Redis, with values of 40 bytes that do not repeat
    #[arg(long, default_value_t = 100_000)]
    keys: u64,
    /// Writes a second, of keys at random
    #[arg(long, default_value_t = 20)]
    writes: u64,
    /// Checkpoints that are recorded, 5 s apart
    #[arg(long, default_value_t = 24)]
    recorded: usize,
    /// Hours of the store's time
    #[arg(long, default_value_t = 24)]
    hours: u64,
    /// Hours that checkpoints are kept
    #[arg(long, value_delimiter = ',', default_value = "1,6")]
    keep: Vec<u64>,
}

impl DayArguments {
    pub fn with(common: Common) -> Self {
        Self { common, keys: 100_000, writes: 20, recorded: 24, hours: 24, keep: vec![1, 6] }
    }
}

/// `--store-every`.
const EVERY: Duration = Duration::from_secs(5);

const ABOUT: &str = "The checkpoints of a Redis with that many keys, to which a client writes at \
    random, are recorded, one every 5 s, and stored again and again with the times of a day, by \
    the code that stores them in earnest: gathered, packed, chains folded, old ones deleted, the \
    list read and what is touched replaced every minute, as `hotspare run --store` does with \
    `--store-every 5s`. Into a directory; requests are counted where they would go to S3. Cost: \
    Amazon S3 Standard, us-east-1, list prices of 2025 (aws.amazon.com/s3/pricing): 0.005 $ for \
    1,000 PUT and LIST, 0.0004 $ for 1,000 GET and HEAD, DELETE free, 0.023 $ a GB (10^9) and \
    month; transfer within the region is free. At the end the oldest and the newest checkpoint are \
    read and every byte of them is checked.";

const COLUMNS: [&str; 13] = [
    "kept h",
    "checkpoints stored",
    "there at most",
    "folds",
    "written GB",
    "store MB after 6 h",
    "after 12 h",
    "after 24 h",
    "at most",
    "PUT, LIST",
    "GET, HEAD",
    "DELETE",
    "$ a day: storage + requests",
];

/// A checkpoint as it was recorded.
struct Recorded {
    state: Checkpoint,
    gone: Vec<Span>,
    pages: Vec<Block>,
}

/// How a day went.
#[derive(Clone, Debug, Default, Serialize)]
struct Day {
    kept_h: u64,
    stored: u64,
    there_max: usize,
    folds: u64,
    written_bytes: u64,
    /// Hours, bytes.
    sizes: Vec<(f64, u64)>,
    puts: u64,
    gets: u64,
    deletes: u64,
    storage_dollars: f64,
    requests_dollars: f64,
}

/// Records, stores for a day, and shows what it took.
pub fn day(arguments: &DayArguments) -> Result<()> {
    ensure!(arguments.common.against.is_none(), "day does not compare commits");
    let hotspare = tree::build_hotspare()?;
    let mut report = Report::new("day", &arguments.common)?;
    let quick = arguments.common.quick;
    let keys = if quick { 2000 } else { arguments.keys };
    let (count, hours) = if quick { (2, 1) } else { (arguments.recorded, arguments.hours) };
    let (touched, recorded) = record_all(&hotspare, keys, arguments.writes, count)?;
    let mean = recorded[1..].iter().map(|one| pages_of(one) * PAGE_BYTES).sum::<u64>()
        / (recorded.len() as u64 - 1);
    let said = format!(
        "{keys} keys, {} writes a second: {} checkpoints recorded, of {:.2} MB of memory, the \
         first of {:.1} MB.",
        arguments.writes,
        recorded.len() - 1,
        megabytes(mean),
        megabytes(pages_of(&recorded[0]) * PAGE_BYTES)
    );
    println!("{said}\n");
    let mut table = Table::new(&COLUMNS);
    let mut curves = Vec::new();
    for &kept_h in if quick { &[0][..] } else { &arguments.keep } {
        let day = store(&recorded, &touched, kept_h, hours)?;
        report.add(json!({ "keys": keys, "writes": arguments.writes, "kept_h": kept_h }), &day)?;
        row(&mut table, &day);
        let points = day.sizes.iter().map(|&(hour, bytes)| (hour, megabytes(bytes))).collect();
        curves.push(Curve { name: format!("--keep {kept_h}h"), points });
    }
    report.plot(Plot {
        name: "size".to_owned(),
        title: "A day of checkpoints of a Redis".to_owned(),
        about: said.clone(),
        panels: vec![Panel { x: Axis::linear("hours"), y: Axis::linear("store, MB"), curves }],
    });
    report.finish("day", &format!("{}\n{}\n{}", wrapped(ABOUT), wrapped(&said), table.text))
}

fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

fn pages_of(recorded: &Recorded) -> u64 {
    let each = recorded.pages.iter();
    each.filter(|block| matches!(block.content, BlockContent::Bytes(_)))
        .map(|block| block.span.pages)
        .sum()
}

fn row(table: &mut Table, day: &Day) {
    let after = |hours: f64| {
        let found = day.sizes.iter().find(|(hour, _)| *hour >= hours);
        found.map_or_else(|| "-".to_owned(), |(_, bytes)| format!("{:.0}", megabytes(*bytes)))
    };
    let most = day.sizes.iter().map(|size| size.1).max().unwrap_or(0);
    table.row([
        day.kept_h.to_string(),
        day.stored.to_string(),
        day.there_max.to_string(),
        day.folds.to_string(),
        format!("{:.1}", megabytes(day.written_bytes) / 1e3),
        after(6.0),
        after(12.0),
        after(24.0),
        format!("{:.0}", megabytes(most)),
        day.puts.to_string(),
        day.gets.to_string(),
        day.deletes.to_string(),
        format!("{:.3} + {:.3}", day.storage_dollars, day.requests_dollars),
    ]);
}

/// A whole checkpoint and those that follow it, and what was touched.
fn record_all(
    hotspare: &Path,
    keys: u64,
    writes: u64,
    count: usize,
) -> Result<(TouchSet, Vec<Recorded>)> {
    let (_lab, place, filled) = record_writes(hotspare, keys, writes, EVERY, count)?;
    let store = Store::open(&Address::Directory(place), None)?;
    let catalogue = store.catalogue(NAME)?;
    let names: Vec<Name> = catalogue.names();
    let after = |name: &&Name| name.time_ms > filled;
    let increments: Vec<Name> =
        names.iter().filter(after).filter(|name| name.base != Base::Whole).copied().collect();
    ensure!(increments.len() > count, "only {} checkpoints were recorded", increments.len());
    let touched = store.touches(NAME, names[0].reign)?;
    let mut all = Vec::new();
    for (at, name) in increments.into_iter().take(count + 1).enumerate() {
        let loaded = store.load(NAME, &catalogue, name)?;
        let (gone, wanted) = match at {
            0 => (Vec::new(), loaded.all()),
            _ => changed(&store, name)?,
        };
        all.push(Recorded { state: loaded.checkpoint()?, gone, pages: loaded.read(&wanted)? });
    }
    Ok((touched, all))
}

/// What a checkpoint takes away and brings.
fn changed(store: &Store, name: Name) -> Result<(Vec<Span>, Vec<Span>)> {
    let manifest = store.manifest(NAME, name)?;
    let spans = |runs: &[hotspare_store::PageRun]| {
        let span = |run: &hotspare_store::PageRun| {
            let owner = *manifest.owners.get(run.owner as usize)?;
            Some(Span { owner, start: run.first * PAGE_BYTES, pages: run.pages })
        };
        runs.iter().filter_map(span).collect()
    };
    Ok((spans(&manifest.gone), spans(&manifest.runs)))
}

/// A store that lives for a day.
struct Life<'a> {
    recorded: &'a [Recorded],
    touched: &'a TouchSet,
    gatherer: Gatherer,
    writer: Writer,
    catalogue: Catalogue,
    day: Day,
    began_ms: u64,
}

fn store(recorded: &[Recorded], touched: &TouchSet, kept_h: u64, hours: u64) -> Result<Day> {
    let directory = tree::target().join(format!("day/{}", std::process::id()));
    std::fs::create_dir_all(&directory).context("make a directory for a day")?;
    let store = Store::open(&Address::Directory(directory.join("store")), None)?;
    let writer = Writer::claim(store, NAME, ("a day", 1), "here", Box::new(|_| Ok(())))?;
    let mut life = Life {
        recorded,
        touched,
        gatherer: Gatherer::new(&directory)?,
        writer,
        catalogue: Catalogue::default(),
        day: Day { kept_h, ..Day::default() },
        began_ms: recorded[0].state.clocks.realtime_ns / 1_000_000,
    };
    let lived = life.live(Duration::from_secs(hours * 3600), &directory.join("store"));
    let day = life.day;
    std::fs::remove_dir_all(&directory).context("remove what was stored")?;
    lived.map(|()| day)
}

impl Life<'_> {
    fn live(&mut self, length: Duration, place: &Path) -> Result<()> {
        let (mut tidied, mut looked, mut tracked, mut sampled) = <(Duration, _, _, _)>::default();
        let keep = Keep { younger: Duration::from_secs(self.day.kept_h * 3600), last: 10 };
        let mut now = Duration::ZERO;
        let mut number = 0;
        while now <= length {
            if now >= looked + TIDY {
                looked = now;
                self.catalogue = self.writer.store().catalogue(NAME)?;
            }
            self.step(number, now)?;
            if now >= tracked + TRACK {
                tracked = now;
                self.writer.store().put_touches(NAME, self.writer.reign(), self.touched)?;
            }
            if now >= tidied + TIDY.min(EVERY * 10) {
                tidied = now;
                if let Some(folded) = self.writer.fold(&self.catalogue)? {
                    self.day.folds += 1;
                    self.day.written_bytes += folded.name.bytes;
                    self.catalogue.add(folded.name);
                }
                let now_ms = self.began_ms + now.as_millis() as u64;
                self.writer.forget(&mut self.catalogue, &keep, now_ms)?;
            }
            self.day.there_max = self.day.there_max.max(self.catalogue.names().len());
            if now >= sampled + SAMPLE || now == length {
                sampled = now;
                self.day.sizes.push((now.as_secs_f64() / 3600.0, bytes_below(place)?));
            }
            (now, number) = (now + EVERY, number + 1);
        }
        self.count(length);
        self.check()
    }

    /// One checkpoint: the first is whole, the others come again and again.
    fn step(&mut self, number: usize, now: Duration) -> Result<()> {
        let followers = self.recorded.len() - 1;
        let at = if number == 0 { 0 } else { 1 + (number - 1) % followers };
        let Recorded { state, gone, pages } = &self.recorded[at];
        let (position, whole) = (Position::checkpoint(Epoch(number as u64 + 1)), number == 0);
        self.gatherer.begin(position, Term(1), whole);
        for span in gone {
            self.gatherer.discard(span.owner, span.start, span.pages);
        }
        for Block { span, content } in pages {
            match content {
                BlockContent::Bytes(bytes) => {
                    self.gatherer.pages(span.owner, span.start, bytes.as_ref())?;
                }
                BlockContent::Zero => self.gatherer.zero(span.owner, span.start, span.pages),
                BlockContent::Absent => {}
            }
        }
        let mut state = state.clone();
        state.position = position;
        state.term = Term(1);
        state.clocks.realtime_ns = (self.began_ms + now.as_millis() as u64) * 1_000_000;
        self.gatherer.state(&state.to_bytes());
        ensure!(self.gatherer.end()?, "a recorded checkpoint has too many file changes");
        let batch = self.gatherer.take()?.context("nothing was gathered")?;
        if !whole {
            ensure!(self.writer.can_go_on(&self.catalogue)?, "what it stands on is gone");
        }
        let stored = self.writer.store_batch(&batch, About::default())?;
        self.day.stored += 1;
        self.day.written_bytes += stored.name.bytes;
        self.catalogue.add(stored.name);
        Ok(())
    }

    fn count(&mut self, length: Duration) {
        let Requests { puts, gets, deletes } = self.writer.store().bucket().requests();
        let day = &mut self.day;
        (day.puts, day.gets, day.deletes) = (puts, gets, deletes);
        let days = length.as_secs_f64() / 86400.0;
        let mean =
            day.sizes.iter().map(|size| size.1 as f64).sum::<f64>() / day.sizes.len().max(1) as f64;
        // A month of 30 days.
        day.storage_dollars = mean / 1e9 * GB_MONTH / 30.0;
        day.requests_dollars = (puts as f64 * PUTS + gets as f64 * GETS) / 1e3 / days;
    }

    /// What is there can be had, every byte.
    fn check(&self) -> Result<()> {
        let store = self.writer.store();
        let catalogue = store.catalogue(NAME)?;
        ensure!(catalogue == self.catalogue, "the store has others than its writer thinks");
        let oldest = catalogue.names().first().copied();
        let ends: BTreeSet<Name> = oldest.into_iter().chain(catalogue.newest(None)).collect();
        for name in ends {
            let loaded = store.load(NAME, &catalogue, name)?;
            ensure!(loaded.verify()? > 0, "{name:?} has no objects");
        }
        Ok(())
    }
}

fn bytes_below(place: &Path) -> Result<u64> {
    let mut bytes = 0;
    let mut folders: Vec<PathBuf> = vec![place.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).context("look into the store")? {
            let entry = entry?;
            let meta = entry.metadata()?;
            if meta.is_dir() { folders.push(entry.path()) } else { bytes += meta.len() }
        }
    }
    Ok(bytes)
}
