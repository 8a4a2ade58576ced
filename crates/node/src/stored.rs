//! Stored checkpoints: what a guest's primary puts into a directory or S3 beside its spares, and
//! what is made of it later.
//!
//! The thread `store` takes what the pause has produced anyway, and makes one checkpoint of many
//! (`hotspare_store::Gatherer`); the thread `store-writer` writes it. Neither is waited for: if the
//! store is slow or gone more is gathered, and everybody is told.

pub mod peer;
pub mod restore;
pub mod show;
mod sink;
mod upload;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use hotspare_store::{Address, Keep, Key, Store, StoreError};

use crate::agent::Agent;
use crate::cli::{duration, long_duration};
use crate::settings::Settings;

pub use sink::{Sink, TouchSink};

/// `--store` and what belongs to it.
#[derive(Debug, Args)]
pub struct StoreArguments {
    /// Also keep checkpoints in a directory, `file:///DIR`, or an S3-compatible store,
    /// `s3://BUCKET/PREFIX[?endpoint=URL&region=NAME]`, from which `hotspare restore` starts the
    /// guest anew on any host. Keys for S3 are taken from AWS_ACCESS_KEY_ID and
    /// AWS_SECRET_ACCESS_KEY. A spare that takes over goes on with it.
    #[arg(long, value_name = "URL", env = "HOTSPARE_STORE")]
    store: Option<Address>,
    /// How often a checkpoint is stored: two requests each time.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    store_every: Duration,
    /// Stored checkpoints are kept for this long …
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = long_duration)]
    keep: Duration,
    /// … and this many of the last ones in any case.
    #[arg(long, value_name = "N", default_value_t = 10)]
    keep_last: usize,
    /// How often to track what the guest touches after a checkpoint: `restore` brings that first.
    /// 60s and every=60s are the same; 0 never does.
    #[arg(long, value_name = "[every=]TIME", default_value = "60s", value_parser = seldom)]
    track: Duration,
    /// File with the key that encrypts what is stored: 64 hexadecimal digits, as from
    /// `openssl rand -hex 32`. The same path on all hosts.
    #[arg(long, value_name = "FILE", env = "HOTSPARE_STORE_KEY")]
    store_key: Option<PathBuf>,
}

/// A time, or never.
fn seldom(text: &str) -> Result<Duration, String> {
    let text = text.strip_prefix("every=").unwrap_or(text);
    if text == "0" { Ok(Duration::ZERO) } else { long_duration(text) }
}

impl StoreArguments {
    /// Opens the store that a checkpoint is read from.
    pub fn open(&self, from: &Address) -> anyhow::Result<Store> {
        let key = self.store_key.as_deref().map(Key::load).transpose()?;
        Ok(Store::open(from, key)?)
    }

    /// Settings of a guest that starts; fails where they could never work.
    pub fn settings(&self) -> anyhow::Result<Option<StoreSettings>> {
        let Some(address) = &self.store else { return Ok(None) };
        let random = hotspare_replica::heartbeat::fresh_key()?;
        let settings = StoreSettings {
            address: address.clone(),
            every: self.store_every,
            keep: Keep { younger: self.keep, last: self.keep_last.max(1) },
            key: self.store_key.clone(),
            track: self.track,
            lineage: random[..8].iter().map(|byte| format!("{byte:02x}")).collect(),
        };
        settings.key()?;
        Ok(Some(settings))
    }
}

/// Where checkpoints are stored, equal on all hosts of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreSettings {
    /// The place.
    pub address: Address,
    /// How often.
    pub every: Duration,
    /// What is kept.
    pub keep: Keep,
    /// File of the key.
    pub key: Option<PathBuf>,
    /// How often what the guest touches is tracked; zero is never.
    pub track: Duration,
    /// Name of this run of the guest, on whichever hosts.
    pub lineage: String,
}

const NAME: &str = "store";

impl StoreSettings {
    fn key(&self) -> Result<Option<Key>, StoreError> {
        self.key.as_deref().map(Key::load).transpose()
    }

    fn open(&self) -> Result<Store, StoreError> {
        Store::open(&self.address, self.key()?)
    }

    /// As a pair for the greeting.
    pub fn to_pair(&self) -> (String, String) {
        let key = self.key.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
        let Keep { younger, last } = self.keep;
        let (every, younger) = (self.every.as_millis(), younger.as_millis());
        let Self { address, lineage, .. } = self;
        let track = self.track.as_millis();
        let words = format!("{every} {younger} {last} {lineage} {address}");
        (NAME.to_owned(), format!("{words}\n{key}\n{track}"))
    }

    /// Reads what [`StoreSettings::to_pair`] wrote.
    pub fn from_value(value: &str) -> anyhow::Result<Self> {
        let (words, rest) = value.split_once('\n').context("a store without a key's place")?;
        let (key, track) = rest.rsplit_once('\n').context("a store without tracking")?;
        let parts: Vec<&str> = words.splitn(5, ' ').collect();
        let [every, younger, last, lineage, address] = parts[..] else {
            bail!("{words:?} describes no store");
        };
        Ok(Self {
            address: address.parse()?,
            every: Duration::from_millis(every.parse()?),
            keep: Keep { younger: Duration::from_millis(younger.parse()?), last: last.parse()? },
            key: (!key.is_empty()).then(|| key.into()),
            track: Duration::from_millis(track.parse()?),
            lineage: lineage.to_owned(),
        })
    }
}

/// Settings of the guest as they are stored: without what concerns its store.
fn stored_settings(settings: &Settings) -> Vec<(String, String)> {
    let mut pairs = settings.to_pairs();
    // An arbiter belongs to the hosts, as the store does.
    pairs.retain(|(name, _)| name != NAME && name != "arbiter");
    pairs
}

/// Starts to store, if that is wanted.
pub fn start(agent: &Agent, settings: &Settings) -> Option<Sink> {
    let store = settings.store.clone()?;
    match sink::start(agent, settings, store) {
        Ok(sink) => Some(sink),
        Err(error) => {
            agent.reporter.alarm(&format!("CHECKPOINTS ARE NOT STORED: {error:#}"));
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_a_store_survive_the_greeting() {
        let settings = StoreSettings {
            address: "s3://b/p?endpoint=http://h:1&region=r".parse().expect("an address"),
            every: Duration::from_millis(1500),
            keep: Keep { younger: Duration::from_secs(3600), last: 7 },
            key: Some("/etc/a key".into()),
            track: Duration::from_secs(60),
            lineage: "0123".into(),
        };
        let read = |settings: &StoreSettings| StoreSettings::from_value(&settings.to_pair().1);
        assert_eq!(read(&settings).expect("reads"), settings);
        let address = "file:///a dir/b".parse().expect("an address");
        let settings = StoreSettings { key: None, address, ..settings };
        assert_eq!(read(&settings).expect("reads"), settings);
        assert!(StoreSettings::from_value("1 2 3\n").is_err());
    }
}
