//! `hotspare restore`: a guest goes on from a stored checkpoint, on any host that qualifies.
//!
//! What is wrong with this host is found before anything is made. Then the road is that of a spare:
//! a ghost is built of the checkpoint, and takes over.

use std::net::IpAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, bail};
use hotspare_image::Checkpoint;
use hotspare_image::memory::PAGE_BYTES;
use hotspare_image::objects::Object;
use hotspare_image::sockets::SocketAddress;
use hotspare_image::source::PageSource;
use hotspare_image::touch::TouchSet;
use hotspare_net::takeover::ServiceAddress;
use hotspare_process::lazy::{Loader, LoaderProgress, Plan, Start};
use hotspare_replica::HostFacts;
use hotspare_store::{Catalogue, Known, Loaded, Name, Store};

use crate::agent::Agent;
use crate::alike::Comparison;
use crate::facts;
use crate::history::{now_ms, utc_ms};
use crate::settings::Settings;
use crate::spare::Held;

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

fn look_for(store: &Store, guest: &str, at: At) -> anyhow::Result<(Catalogue, Name)> {
    let catalogue = store.catalogue(guest)?;
    if catalogue.names().is_empty()
        && let Ok(guests) = store.guests()
        && !guests.is_empty()
    {
        bail!("the store has no checkpoint of {guest:?}; it has some of {}", guests.join(", "));
    }
    let name = choose(guest, &catalogue, at)?;
    Ok((catalogue, name))
}

/// Gets ready to read a checkpoint.
pub fn find(store: &Store, guest: &str, at: At) -> anyhow::Result<Loaded> {
    let (catalogue, name) = look_for(store, guest, at)?;
    Ok(store.load(guest, &catalogue, name)?)
}

/// A checkpoint that was chosen, and what is known of it.
pub struct Chosen {
    known: Known,
    asked: Option<JoinHandle<TouchSet>>,
}

impl Chosen {
    /// Looks it up.
    pub fn new(store: &Store, guest: &str, at: At) -> anyhow::Result<Self> {
        let (catalogue, name) = look_for(store, guest, at)?;
        let asked = ask_for_touched(store, guest, name);
        Ok(Self { known: store.look_up(guest, &catalogue, name)?, asked })
    }

    /// Where the guest lives; None also if that cannot be read.
    pub fn service(&self) -> Option<ServiceAddress> {
        Settings::from_pairs(&self.known.about().settings).ok()?.service
    }

    /// Gets ready to read it, and fetches what comes before the guest runs while its state is still
    /// on its way.
    pub fn find(self, beginning: Beginning) -> anyhow::Result<Found> {
        let Self { known, asked } = self;
        let mut touched = TouchSet::default();
        let soon = |loaded: &Loaded| {
            touched = asked.and_then(|asked| asked.join().ok()).unwrap_or_default();
            let first = match beginning {
                Beginning::With(start) => Plan::first_of(&touched, start, loaded),
                Beginning::Loaded => Vec::new(),
            };
            touched.needed.iter().copied().chain(first).collect()
        };
        let loaded = Arc::new(known.load_ahead(soon)?);
        let planned = loaded.clone();
        let plan = move || {
            let plan = match beginning {
                Beginning::With(start) => Plan::new(&touched, start, &*planned),
                Beginning::Loaded => Plan { first: planned.all(), ..Plan::default() },
            };
            planned.get_ready();
            (touched, plan)
        };
        // Beside what is needed before it is.
        let plan = std::thread::Builder::new().name("plan".into()).spawn(plan)?;
        Ok(Found { loaded, plan })
    }
}

/// Reads a touch set beside everything else. Without it pages come as they are asked for.
fn ask_for_touched(store: &Store, guest: &str, name: Name) -> Option<JoinHandle<TouchSet>> {
    let (store, guest) = (store.clone(), guest.to_owned());
    let read = move || store.touches(&guest, name.reign).unwrap_or_default();
    std::thread::Builder::new().name("touched".into()).spawn(read).ok()
}

/// When the guest starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// When all its memory is there.
    Loaded,
    /// Before.
    With(Start),
}

/// A checkpoint that was found.
pub struct Found {
    loaded: Arc<Loaded>,
    plan: JoinHandle<(TouchSet, Plan)>,
}

/// A checkpoint on its way into a guest.
pub struct Restoring {
    plan: JoinHandle<(TouchSet, Plan)>,
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
        Found { loaded, plan }: Found,
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
        Ok(Self { loaded, plan, checkpoint, settings, age })
    }

    /// Which one it is.
    pub fn name(&self) -> Name {
        self.loaded.name()
    }

    /// Builds the ghost. On success it can start; what of its memory is not there comes behind it.
    pub fn build(self, agent: &Agent, bridge: Option<&str>) -> anyhow::Result<Held> {
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
        let source = self.loaded;
        let mut changes = std::io::BufReader::new(source.changes());
        held.take_files(&mut changes, source.changes_bytes(), progress)
            .context("bring back the replicated directories")?;
        let mut loading = None;
        let (touched, plan) = self.plan.join().ok().context("a thread failed: plan")?;
        let run = |loader: Loader| {
            loading = Some(load(agent, loader, source.clone(), touched, self.settings.guest)?);
            Ok(())
        };
        held.ghost.apply_late(self.checkpoint, &*source, &plan, run)?;
        held.late = loading;
        Ok(held)
    }

    /// Bytes of its memory.
    pub fn bytes(&self) -> u64 {
        self.loaded.pages().with_bytes() * PAGE_BYTES
    }
}

/// Brings memory in on a thread of its own, from now on.
fn load(
    agent: &Agent,
    loader: Loader,
    source: Arc<Loaded>,
    mut touched: TouchSet,
    guest: String,
) -> std::io::Result<Arc<LoaderProgress>> {
    let progress = loader.progress();
    let reporter = agent.reporter.clone();
    let started = progress.clone();
    // If it has not been started, whoever waits for that tells why.
    let (name, alarming) = (guest.clone(), reporter.clone());
    let lost = move |why: &str| {
        if started.has_started() {
            alarming.alarm(&format!("GUEST {name} IS LOST: {why}"));
        }
    };
    let run = move || match loader.run(&*source, &lost) {
        Ok(loaded) => {
            reporter.loaded(&guest, &loaded);
            touched.learn(&loaded.missed);
            if !loaded.missed.is_empty()
                && let Err(error) = source.put_touches(&touched)
            {
                tracing::debug!(%error, "what this restore has learned is not kept");
            }
        }
        Err(failure) => {
            // Until this program ends with it, nobody may find what was waited for.
            std::mem::forget(failure);
        }
    };
    std::thread::Builder::new().name("loader".into()).spawn(run)?;
    Ok(progress)
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
    fn a_checkpoint_is_chosen_by_epoch_time_or_age() {
        assert_eq!("17".parse(), Ok(At::Epoch(17)));
        assert_eq!("1970-01-01T00:00:01".parse(), Ok(At::Time(1000)));
        assert_eq!("10m".parse(), Ok(At::Ago(Duration::from_secs(600))));
        assert_eq!("newest".parse(), Ok(At::Newest));
        assert!("soon".parse::<At>().is_err());
    }
}
