//! What the primary decides and a spare must share.

use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail};
use hotspare_cluster::Quorum;
use hotspare_kernel::netlink::Netlink;
use hotspare_net::probe;
use hotspare_net::takeover::{ServiceAddress, Uplink};
use hotspare_process::objects::rules::{FileRules, Standing};

use crate::rhythm::Epochs;
use crate::stored::StoreSettings;

/// A `--files` argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRule {
    /// How the spare comes to have the files.
    pub replicated: bool,
    /// Absolute directory.
    pub path: String,
}

impl FromStr for FileRule {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (kind, path) = text.split_once(':').context("write shared:/PATH or replicate:/PATH")?;
        let replicated = match kind {
            "shared" => false,
            "replicate" => true,
            _ => bail!("{kind:?} is neither `shared` nor `replicate`"),
        };
        if !path.starts_with('/') || path.trim_end_matches('/').is_empty() {
            bail!("{path:?} is not an absolute directory below /");
        }
        Ok(Self { replicated, path: path.trim_end_matches('/').to_owned() })
    }
}

impl std::fmt::Display for FileRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.replicated { "replicate" } else { "shared" };
        write!(f, "{kind}:{}", self.path)
    }
}

/// What clients may notice of a failover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Guarantee {
    /// Nothing is held; clients may find the guest up to one epoch in the past.
    #[default]
    Timeline,
    /// Output waits until a spare has the state that it came from; connections go on.
    OutputCommit,
}

impl Guarantee {
    /// Whether nobody has seen more than the last checkpoint says: all output has waited for it.
    pub fn is_exact(self) -> bool {
        self == Guarantee::OutputCommit
    }
}

impl std::fmt::Display for Guarantee {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Guarantee::Timeline => "timeline",
            Guarantee::OutputCommit => "output-commit",
        })
    }
}

/// How the packets of a guest reach its clients where output is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum PacketPath {
    /// Through the host of a spare.
    #[default]
    Spare,
    /// From the primary's host; at a failover the address moves.
    Direct,
}

impl std::fmt::Display for PacketPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            PacketPath::Spare => "spare",
            PacketPath::Direct => "direct",
        })
    }
}

/// Settings of a guest, equal on all its hosts.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Name of the guest.
    pub guest: String,
    /// `--epoch`.
    pub epochs: Epochs,
    /// The guest's address.
    pub service: Option<ServiceAddress>,
    /// `--files`.
    pub files: Vec<FileRule>,
    /// `--guarantee`.
    pub guarantee: Guarantee,
    /// Who decides about terms, as [`crate::arbiter::Place::identity`] has it.
    pub arbiter: Option<String>,
    /// `--path`.
    pub path: PacketPath,
    /// `--store`.
    pub store: Option<StoreSettings>,
    /// `--commit-on`.
    pub commit_on: Quorum,
}

impl Settings {
    /// As pairs of names and values, for the greeting.
    pub fn to_pairs(&self) -> Vec<(String, String)> {
        let mut pairs = vec![
            ("guest".to_owned(), self.guest.clone()),
            ("epoch-us".to_owned(), self.epochs.longest().as_micros().to_string()),
        ];
        if self.epochs == Epochs::Auto {
            pairs.push(("epoch".to_owned(), "auto".to_owned()));
        }
        pairs.extend(self.service.map(|service| ("service".to_owned(), service.to_string())));
        pairs.extend(self.files.iter().map(|rule| ("files".to_owned(), rule.to_string())));
        if self.guarantee != Guarantee::default() {
            pairs.push(("guarantee".to_owned(), self.guarantee.to_string()));
        }
        pairs.extend(self.arbiter.iter().map(|arbiter| ("arbiter".to_owned(), arbiter.clone())));
        if self.path != PacketPath::default() {
            pairs.push(("path".to_owned(), self.path.to_string()));
        }
        pairs.extend(self.store.iter().map(StoreSettings::to_pair));
        if self.commit_on != Quorum::default() {
            pairs.push(("commit-on".to_owned(), self.commit_on.to_string()));
        }
        pairs
    }

    /// Reads what [`Settings::to_pairs`] wrote.
    pub fn from_pairs(pairs: &[(String, String)]) -> anyhow::Result<Self> {
        let mut settings = Self {
            guest: String::new(),
            epochs: Epochs::Every(Duration::from_millis(100)),
            service: None,
            files: Vec::new(),
            guarantee: Guarantee::default(),
            arbiter: None,
            path: PacketPath::default(),
            store: None,
            commit_on: Quorum::default(),
        };
        for (name, value) in pairs {
            match name.as_str() {
                "guest" => settings.guest.clone_from(value),
                "epoch-us" => {
                    settings.epochs = Epochs::Every(Duration::from_micros(value.parse()?));
                }
                // After the one in microseconds.
                "epoch" if value == "auto" => settings.epochs = Epochs::Auto,
                "service" => settings.service = Some(value.parse()?),
                "files" => settings.files.push(value.parse()?),
                "arbiter" => settings.arbiter = Some(value.clone()),
                "guarantee" => {
                    let parsed = <Guarantee as clap::ValueEnum>::from_str(value, false);
                    settings.guarantee = parsed.map_err(anyhow::Error::msg)?;
                }
                "path" => {
                    let parsed = <PacketPath as clap::ValueEnum>::from_str(value, false);
                    settings.path = parsed.map_err(anyhow::Error::msg)?;
                }
                "store" => settings.store = Some(StoreSettings::from_value(value)?),
                "commit-on" => settings.commit_on = value.parse().map_err(anyhow::Error::msg)?,
                other => bail!("the primary has a setting {other:?} that this version lacks"),
            }
        }
        Ok(settings)
    }

    /// The longest between two checkpoints of a guest that nothing is in the way of.
    pub fn epoch(&self) -> Duration {
        self.epochs.longest()
    }

    /// Whether these settings make sense together.
    pub fn require_consistent(&self) -> anyhow::Result<()> {
        if self.guarantee == Guarantee::OutputCommit && self.service.is_none() {
            bail!(
                "--guarantee output-commit holds the packets of a service, and there is none: give \
                 --service-address, or leave the guarantee at timeline"
            );
        }
        if self.commit_on != Quorum::All && !self.guarantee.is_exact() {
            bail!(
                "--commit-on says how many spares output waits for, and under --guarantee {} it \
                 waits for none: give --guarantee output-commit, or leave it out",
                self.guarantee
            );
        }
        Ok(())
    }

    /// Whether what the guest does reaches others by more than its packets, which are stopped when
    /// its term is over.
    pub fn writes_shared_files(&self) -> bool {
        self.files.iter().any(|rule| !rule.replicated)
    }

    /// Fails if a spare with this arbiter could not follow a primary with these settings.
    pub fn require_same_arbiter(&self, own: Option<&str>) -> anyhow::Result<()> {
        let name = |arbiter: Option<&str>| arbiter.unwrap_or("none").to_owned();
        if self.arbiter.as_deref() != own {
            bail!(
                "the primary has the arbiter {}, this spare {}: start both with the same --arbiter",
                name(self.arbiter.as_deref()),
                name(own)
            );
        }
        Ok(())
    }

    /// Standing of the guest's paths.
    pub fn rules(&self) -> FileRules {
        FileRules::new(self.files.iter().map(|rule| {
            let standing = if rule.replicated { Standing::Replicated } else { Standing::Shared };
            (rule.path.clone(), standing)
        }))
    }

    /// Replicated directories, in the order in which they travel.
    pub fn replicated(&self) -> Vec<String> {
        let rules = self.files.iter().filter(|rule| rule.replicated);
        rules.map(|rule| rule.path.clone()).collect()
    }
}

/// How this host reaches the service's clients: a bridge, or the interface that has an address in
/// the service's network. Through the agent in either case where output is held, and where it ends
/// with a lease: no other way stops when the agent does.
pub fn uplink(
    bridge: Option<&str>,
    service: ServiceAddress,
    settings: &Settings,
) -> anyhow::Result<Uplink> {
    let gated = settings.guarantee.is_exact() || settings.arbiter.is_some();
    let through = |parent| match gated {
        false => Uplink::Routed { parent },
        true => Uplink::Gated { parent },
    };
    if let Some(name) = bridge {
        let name = name.to_owned();
        return Ok(match gated {
            false => Uplink::Bridge { name, gateway: None },
            true => through(name),
        });
    }
    let mut all = addresses()?.into_iter();
    if let Some((name, _)) = all.find(|(_, found)| same_network(*found, service)) {
        return Ok(through(name));
    }
    bail!(
        "no interface of this host has an address in the network of {service}; \
         give --service-bridge BRIDGE"
    )
}

/// Whether somebody has the service address before we take it, in words: who answers when the link
/// is asked. `bridge` is as for [`uplink`].
pub fn answers_already(bridge: Option<&str>, service: ServiceAddress) -> Option<String> {
    let address = service.address;
    let interfaces = addresses().ok()?;
    if interfaces.iter().any(|(_, found)| *found == address) {
        return Some(format!(
            "this host itself has the service address {address}: the guest must have it alone; \
             take it off the host's interface (ip address del) or choose another"
        ));
    }
    let within = interfaces.iter().find(|(_, found)| same_network(*found, service));
    let name = bridge.or(within.map(|(name, _)| name.as_str()))?;
    let own = interfaces.iter().filter(|(of, _)| of == name).find_map(|(_, own)| match own {
        IpAddr::V4(own) => Some(*own),
        IpAddr::V6(_) => None,
    });
    // If this fails, so will what needs the interface, and say why.
    let link = Netlink::open().and_then(|mut netlink| netlink.link(name)).ok()?;
    let mac = probe::who_has(link, own, address, PROBE).ok()??;
    let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
    Some(format!(
        "{address} answers on this network already (at {mac}): does the guest run on another host, \
         or is the address somebody else's? Clients would reach one or the other; end the other one"
    ))
}

/// How long a neighbour may take to answer.
const PROBE: Duration = Duration::from_millis(200);

/// Addresses of this host, each with its interface.
fn addresses() -> anyhow::Result<Vec<(String, IpAddr)>> {
    let each = nix::ifaddrs::getifaddrs()?.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        let v6 = || address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip()));
        Some((interface.interface_name, v4.or_else(v6)?))
    });
    Ok(each.collect())
}

fn same_network(found: IpAddr, service: ServiceAddress) -> bool {
    use IpAddr::{V4, V6};
    match (found, service.address) {
        (V4(a), V4(b)) => {
            let shift = 32u32.saturating_sub(service.prefix.into());
            (u32::from(a) ^ u32::from(b)).checked_shr(shift).unwrap_or(0) == 0
        }
        (V6(a), V6(b)) => {
            let shift = 128u32.saturating_sub(service.prefix.into());
            (u128::from(a) ^ u128::from(b)).checked_shr(shift).unwrap_or(0) == 0
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_survive_the_greeting() {
        let settings = Settings {
            guest: "redis".into(),
            epochs: Epochs::Every(Duration::from_millis(50)),
            service: Some("10.0.0.5/24".parse().expect("an address")),
            files: vec!["replicate:/data".parse().expect("a rule")],
            guarantee: Guarantee::OutputCommit,
            arbiter: Some("etcd:hotspare".into()),
            path: PacketPath::Direct,
            store: None,
            commit_on: Quorum::Majority,
        };
        assert_eq!(Settings::from_pairs(&settings.to_pairs()).expect("reads"), settings);
        let settings = Settings { epochs: Epochs::Auto, ..settings };
        assert_eq!(Settings::from_pairs(&settings.to_pairs()).expect("reads"), settings);
    }

    #[test]
    fn a_rule_needs_a_kind_and_an_absolute_directory() {
        for wrong in ["/data", "copy:/data", "replicate:data", "shared:/"] {
            assert!(wrong.parse::<FileRule>().is_err(), "{wrong}");
        }
    }
}
