//! `hotspare restore`: a guest goes on from a stored checkpoint, on any host that qualifies.
//!
//! What is wrong with this host is found before anything is made. Then the road is that of a spare:
//! a ghost is built of the checkpoint, and takes over.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use hotspare_image::Checkpoint;
use hotspare_image::memory::PAGE_BYTES;
use hotspare_image::objects::Object;
use hotspare_image::sockets::SocketAddress;
use hotspare_image::source::{BlockContent, PageSource, Span};
use hotspare_image::touch::TouchSet;
use hotspare_net::takeover::ServiceAddress;
use hotspare_process::lazy::{Loader, LoaderProgress, Plan};
use hotspare_process::pages::{Content, PageRun};
use hotspare_replica::HostFacts;
use hotspare_store::{Catalogue, Loaded, Name, Store};

use crate::agent::Agent;
use crate::alike::Comparison;
use crate::facts;
use crate::report::size;
use crate::settings::Settings;
use crate::spare::Held;

/// Pages that are fetched at once.
const FETCH_PAGES: u64 = (8 << 20) / PAGE_BYTES;

/// Which checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// The newest.
    Newest,
    /// The one of this epoch.
    Epoch(u64),
    /// The newest that was there at this time, in milliseconds since 1970.
    Time(u64),
    /// The newest that was there so long ago.
    Ago(Duration),
}

impl std::str::FromStr for At {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "newest" {
            return Ok(Self::Newest);
        }
        if let Ok(epoch) = text.parse() {
            return Ok(Self::Epoch(epoch));
        }
        if let Some(time) = utc_ms(text) {
            return Ok(Self::Time(time));
        }
        crate::cli::long_duration(text).map(Self::Ago).map_err(|_| {
            format!(
                "{text:?} is no epoch (a number), no time (2026-11-22T18:30:00, UTC) and not so \
                 long ago (10m)"
            )
        })
    }
}

/// Milliseconds since 1970 of `YYYY-MM-DDTHH:MM:SS[.mmm][Z]`, also with a space.
fn utc_ms(text: &str) -> Option<u64> {
    let (date, time) = text.trim_end_matches('Z').split_once(['T', ' '])?;
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let number = |text: &str| text.parse::<i64>().ok().filter(|number| *number >= 0);
    let date: Vec<i64> = date.split('-').map(number).collect::<Option<_>>()?;
    let time: Vec<i64> = time.split(':').map(number).collect::<Option<_>>()?;
    let ([year, month, day], [hour, minute, second]) = (&date[..], &time[..]) else { return None };
    let in_range = (1970..10_000).contains(year)
        && (1..=12).contains(month)
        && (1..=31).contains(day)
        && *hour < 24
        && *minute < 60
        && *second < 60;
    if !in_range || fraction.len() > 3 {
        return None;
    }
    // Days before a date, with years that begin in March.
    let (year, month) = if *month < 3 { (year - 1, month + 9) } else { (*year, month - 3) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1;
    let seconds = ((days - 719_468) * 24 + hour) * 3600 + minute * 60 + second;
    let ms = format!("{fraction:0<3}").parse::<i64>().ok()?;
    u64::try_from(seconds * 1000 + ms).ok()
}

fn now_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap_or_default().as_millis() as u64
}

/// The checkpoint that is meant.
pub fn choose(guest: &str, catalogue: &Catalogue, at: At) -> anyhow::Result<Name> {
    let found = match at {
        At::Newest => catalogue.newest(None),
        At::Epoch(epoch) => catalogue.at_epoch(epoch),
        At::Time(ms) => catalogue.newest(Some(ms)),
        At::Ago(ago) => catalogue.newest(Some(now_ms().saturating_sub(ago.as_millis() as u64))),
    };
    found.with_context(|| match catalogue.names().is_empty() {
        true => format!("the store has no checkpoint of a guest {guest:?}: see `hotspare history`"),
        false => format!("the store has no such checkpoint of {guest:?}: see `hotspare history`"),
    })
}

/// Gets ready to read a checkpoint.
pub fn find(store: &Store, guest: &str, at: At) -> anyhow::Result<Loaded> {
    let catalogue = store.catalogue(guest)?;
    if catalogue.names().is_empty()
        && let Ok(guests) = store.guests()
        && !guests.is_empty()
    {
        bail!("the store has no checkpoint of {guest:?}; it has some of {}", guests.join(", "));
    }
    let name = choose(guest, &catalogue, at)?;
    Ok(store.load(guest, &catalogue, name)?)
}

/// A checkpoint on its way into a guest.
pub struct Restoring {
    loaded: Arc<Loaded>,
    checkpoint: Checkpoint,
    /// Of the guest that is made of it.
    pub settings: Settings,
    /// How old the checkpoint is.
    pub age: Duration,
}

impl Restoring {
    /// Reads what is needed to judge; fails if this host does not qualify, and says all of why.
    pub fn prepare(
        loaded: Loaded,
        ours: &HostFacts,
        service: Option<ServiceAddress>,
    ) -> anyhow::Result<Self> {
        let about = loaded.about();
        let mut settings = Settings::from_pairs(&about.settings)?;
        let mut checkpoint = loaded.checkpoint()?;
        let theirs = HostFacts {
            kernel: about.host.kernel.clone(),
            cpu_features: about.host.features.clone(),
            others: about.host.others.clone(),
        };
        let mut wrong = facts::mismatches(ours, &theirs);
        wrong.extend(Comparison::default().compare(about.files.clone()).err());
        if !wrong.is_empty() {
            bail!("this host cannot go on with the guest: {}", wrong.join("; "));
        }
        if let Some(new) = service {
            match settings.service {
                None => bail!("--service-address: the guest had no address of its own"),
                Some(old) => readdress(&mut checkpoint, old.address, new.address)?,
            }
            settings.service = Some(new);
        }
        let age = Duration::from_millis(now_ms().saturating_sub(about.time_ms));
        Ok(Self { loaded: Arc::new(loaded), checkpoint, settings, age })
    }

    /// Which one it is.
    pub fn name(&self) -> Name {
        self.loaded.name()
    }

    /// Builds the ghost. Its memory comes behind it, unless it is to come `first`.
    pub fn build(&self, agent: &Agent, bridge: Option<&str>, first: bool) -> anyhow::Result<Held> {
        for rule in self.settings.files.iter().filter(|rule| rule.replicated) {
            let is_empty = std::fs::read_dir(&rule.path).is_ok_and(|mut all| all.next().is_none());
            if std::path::Path::new(&rule.path).exists() && !is_empty {
                bail!(
                    "--files {rule}: {} is not empty on this host, and would be replaced by what \
                     it held when the checkpoint was taken: move it away first",
                    rule.path
                );
            }
        }
        let mut held = Held::new(&self.checkpoint, self.settings.clone(), bridge)?;
        let progress = &agent.meters.progress;
        let mut changes = std::io::BufReader::new(self.loaded.changes());
        held.take_files(&mut changes, self.loaded.changes_bytes(), progress)
            .context("bring back the replicated directories")?;
        if first {
            self.fill(agent, &mut held)?;
        } else {
            // Without it pages come as they are asked for.
            let touched = self.loaded.touches().unwrap_or_default();
            let plan = Plan::new(&touched, None);
            let loader = held.ghost.apply_late(self.checkpoint.clone(), &*self.loaded, &plan)?;
            held.late = Some(self.load(agent, loader, touched)?);
        }
        Ok(held)
    }

    /// Brings the rest of the memory in on a thread of its own, from now on.
    fn load(
        &self,
        agent: &Agent,
        loader: Loader,
        mut touched: TouchSet,
    ) -> anyhow::Result<Arc<LoaderProgress>> {
        let (progress, source) = (loader.progress(), self.loaded.clone());
        let (reporter, guest) = (agent.reporter.clone(), self.settings.guest.clone());
        let run = move || match loader.run(&*source) {
            Ok(loaded) => {
                let waits = loaded.missed.len() as u64 + loaded.late;
                reporter.note(&format!(
                    "guest {guest} has all its memory: {} came behind it in {:.1} s; it waited \
                     {waits} times",
                    size(loaded.bytes),
                    loaded.took.as_secs_f64()
                ));
                touched.learn(&loaded.missed);
                if !loaded.missed.is_empty()
                    && let Err(error) = source.put_touches(&touched)
                {
                    tracing::debug!(%error, "what this restore has learned is not kept");
                }
            }
            Err(failure) => {
                reporter.alarm(&format!("GUEST {guest} IS LOST: {failure}"));
                // Until this program ends with it, nobody may find what was waited for.
                loop {
                    std::thread::park();
                    std::hint::black_box(&failure);
                }
            }
        };
        std::thread::Builder::new().name("loader".into()).spawn(run)?;
        Ok(progress)
    }

    fn fill(&self, agent: &Agent, held: &mut Held) -> anyhow::Result<()> {
        let progress = &agent.meters.progress;
        held.ghost.begin_full(&self.checkpoint)?;
        let mut failed = None;
        let mut runs = Runs { loaded: &self.loaded, wanted: self.wanted(), ready: Vec::new() };
        let mut next = std::iter::from_fn(|| match runs.next() {
            Ok(run) => {
                progress.add(1);
                run
            }
            Err(error) => {
                failed = Some(error);
                None
            }
        });
        held.ghost.apply(self.checkpoint.clone(), &mut next)?;
        failed.map_or(Ok(()), |error| Err(error).context("read the checkpoint's pages"))
    }

    /// Bytes of its memory.
    pub fn bytes(&self) -> u64 {
        self.loaded.pages().with_bytes() * PAGE_BYTES
    }

    /// All spans, in portions, the first one last.
    fn wanted(&self) -> Vec<Vec<Span>> {
        let mut portions: Vec<Vec<Span>> = Vec::new();
        let mut room = 0;
        for span in self.loaded.all() {
            if room < span.pages {
                portions.push(Vec::new());
                room = FETCH_PAGES;
            }
            room = room.saturating_sub(span.pages);
            portions.last_mut().expect("one was pushed").push(span);
        }
        portions.reverse();
        portions
    }
}

/// Fetches pages as the ghost takes them.
struct Runs<'a> {
    loaded: &'a Loaded,
    wanted: Vec<Vec<Span>>,
    /// The first one last.
    ready: Vec<PageRun>,
}

impl Runs<'_> {
    fn next(&mut self) -> anyhow::Result<Option<PageRun>> {
        while self.ready.is_empty() {
            let Some(spans) = self.wanted.pop() else { return Ok(None) };
            let blocks = self.loaded.read(&spans)?;
            self.ready.extend(blocks.into_iter().rev().map(|block| PageRun {
                owner: block.span.owner,
                start: block.span.start,
                content: match block.content {
                    BlockContent::Bytes(bytes) => Content::Bytes(bytes),
                    BlockContent::Zero => Content::Zero(block.span.pages),
                    BlockContent::Absent => Content::Discard(block.span.pages),
                },
            }));
        }
        Ok(self.ready.pop())
    }
}

/// The guest has another address: what was bound to the old one is bound to it. Its connections
/// end, for no peer knows them.
fn readdress(checkpoint: &mut Checkpoint, old: IpAddr, new: IpAddr) -> anyhow::Result<()> {
    if old.is_ipv4() != new.is_ipv4() {
        bail!("--service-address: the guest had {old}, which is of the other kind");
    }
    let change = |local: &mut Option<SocketAddress>| {
        let address = local.as_ref().and_then(SocketAddress::internet);
        if let Some(mut address) = address.filter(|address| address.ip() == old) {
            address.set_ip(new);
            *local = Some(address.into());
        }
    };
    for file in &mut checkpoint.files {
        match &mut file.object {
            Object::Tcp(socket) => change(&mut socket.local),
            Object::Udp(socket) => change(&mut socket.local),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_what_date_says() {
        // date -ud 2026-11-22T18:30:05 +%s
        assert_eq!(utc_ms("2026-11-22T18:30:05Z"), Some(1_795_372_205_000));
        assert_eq!(utc_ms("2026-11-22 18:30:05.25"), Some(1_795_372_205_250));
        assert_eq!(utc_ms("1970-01-01T00:00:00"), Some(0));
        assert_eq!(utc_ms("2024-02-29T12:00:00"), Some(1_709_208_000_000));
        for wrong in ["", "2026-11-22", "2026-13-01T00:00:00", "2026-11-22T25:00:00", "x"] {
            assert_eq!(utc_ms(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_checkpoint_is_chosen_by_epoch_time_or_age() {
        assert_eq!("17".parse(), Ok(At::Epoch(17)));
        assert_eq!("1970-01-01T00:00:01".parse(), Ok(At::Time(1000)));
        assert_eq!("10m".parse(), Ok(At::Ago(Duration::from_secs(600))));
        assert_eq!("newest".parse(), Ok(At::Newest));
        assert!("soon".parse::<At>().is_err());
    }
}
