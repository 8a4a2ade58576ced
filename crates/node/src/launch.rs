//! A program becomes a guest: its surroundings, its first process, in our hand before it runs.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;

use anyhow::{Context, bail};
use hotspare_files::Role;
use hotspare_image::Term;
use hotspare_image::tree::GuestPid;
use hotspare_kernel::netlink::Netlink;
use hotspare_net::takeover::{ServiceAddress, ServiceNetwork};
use hotspare_process::guest::Guest;
use hotspare_process::init::{FirstProgram, GuestNamespaces, Init, InitConfig};
use hotspare_process::objects::ipc::IpcCapture;
use hotspare_process::objects::outside::OutsideDescriptor;
use hotspare_process::objects::socket::SocketCapture;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::epoch::EpochMaker;
use crate::settings::{Settings, uplink};
use crate::spare::serve_files;

/// Limits of open files that we were given, before we raised them: the guest gets these.
static GIVEN: OnceLock<(u64, u64)> = OnceLock::new();

/// Lets the agent have as many descriptors as the kernel allows: for each of the guest's it may
/// need one. The guest keeps the limit it would have without us.
pub fn raise_descriptor_limit() {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    let _ = GIVEN.set((soft, hard));
    let most = std::fs::read_to_string("/proc/sys/fs/nr_open").unwrap_or_default();
    let most = most.trim().parse().unwrap_or(hard).max(hard);
    // Without CAP_SYS_RESOURCE the hard limit stays.
    if setrlimit(Resource::RLIMIT_NOFILE, most, most).is_err() {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// How the service address is reached.
pub enum Network<'a> {
    /// Through this bridge, or routed.
    Service(Option<&'a str>),
    /// By the guest alone.
    Loopback,
}

/// What to start.
pub struct Launch<'a> {
    pub command: &'a [String],
    pub directory: &'a str,
    pub network: Network<'a>,
}

/// Duplicates of our standard descriptors, which the guest has too.
pub fn outside() -> anyhow::Result<Vec<OutsideDescriptor>> {
    let files: [OwnedFd; 3] = [
        std::io::stdin().as_fd().try_clone_to_owned()?,
        std::io::stdout().as_fd().try_clone_to_owned()?,
        std::io::stderr().as_fd().try_clone_to_owned()?,
    ];
    let numbered = (0..).zip(files);
    Ok(numbered
        .map(|(number, file)| OutsideDescriptor::new(number, file))
        .collect::<Result<_, _>>()?)
}

/// Starts the program; it runs when this returns.
pub fn launch(how: &Launch<'_>, settings: &Settings) -> anyhow::Result<(EpochMaker, Init)> {
    let (directories, mounts, writable) = serve_files(settings, Role::Primary)?;
    let mut config = InitConfig::default();
    config.surroundings.writable = writable;
    let init = Init::start(config)?;
    drop(mounts);
    let namespaces = init.namespaces()?;
    let network = match settings.service {
        Some(service) => bring_up(&how.network, service, settings, &namespaces)?,
        None => None,
    };
    let program = FirstProgram {
        arguments: how.command.to_vec(),
        environment: std::env::vars().map(|(name, value)| format!("{name}={value}")).collect(),
        directory: how.directory.to_owned(),
        user: None,
    };
    let (input, output, errors) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
    let standard = [input.as_fd(), output.as_fd(), errors.as_fd()];
    let newborn = init.spawn(program, standard, Some(GuestPid(2)))?;
    let mut guest = Guest::seize(newborn.host)?;
    if let Some((soft, hard)) = GIVEN.get() {
        let limit = Resource::RLIMIT_NOFILE as u32;
        hotspare_kernel::spawn::set_limit(newborn.host, limit, *soft, *hard)?;
    }
    newborn.go()?;
    if !guest.await_program()? {
        let why = newborn.failure().unwrap_or_else(|| "it was killed".to_owned());
        let name = how.command.first().map_or("", String::as_str);
        let place = match name.contains('/') && !name.starts_with('/') {
            true => format!(" (its path counts from --directory {})", how.directory),
            false => String::new(),
        };
        bail!("cannot start {name}: {why}{place}");
    }
    let names = nix::sys::utsname::uname()?;
    let sockets = SocketCapture::open(namespaces.net.as_fd())?;
    let ipc = IpcCapture::open(namespaces.ipc.into())?;
    let mut maker = EpochMaker::new(guest, settings, outside()?, sockets, ipc);
    maker.directories = directories;
    maker.names = (
        names.nodename().to_string_lossy().into_owned(),
        names.domainname().to_string_lossy().into_owned(),
    );
    (maker.term, maker.network) = (Term(1), network);
    Ok((maker, init))
}

fn bring_up(
    network: &Network<'_>,
    service: ServiceAddress,
    settings: &Settings,
    namespaces: &GuestNamespaces,
) -> anyhow::Result<Option<ServiceNetwork>> {
    match network {
        Network::Service(bridge) => {
            let uplink = uplink(*bridge, service, settings)?;
            let mut prepared = ServiceNetwork::prepare(namespaces.net.as_fd(), service, uplink)?;
            prepared.announce()?;
            Ok(Some(prepared))
        }
        Network::Loopback => {
            let add = || -> anyhow::Result<()> {
                let mut netlink = Netlink::open()?;
                let loopback = netlink.link("lo")?.index;
                Ok(netlink.add_address(loopback, service.address, service.prefix)?)
            };
            namespaces.run(add).context("enter the guest's network")??;
            Ok(None)
        }
    }
}
