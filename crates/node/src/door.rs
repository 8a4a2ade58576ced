//! Tells the spares at once who comes and goes: see `hotspare_net::callers`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use hotspare_image::NodeId;
use hotspare_kernel::netlink::Netlink;
use hotspare_kernel::packet_tap::PacketTap;
use hotspare_net::takeover::GUEST_LINK;
use hotspare_process::init::Init;
use hotspare_replica::PacketSender;

/// How soon the thread ends when it is not wanted any more.
const LOOK_MS: i32 = 500;

type Ways = BTreeMap<NodeId, PacketSender>;

/// Passes on each packet that begins or ends a TCP connection of the guest, on a thread of its
/// own: the one that makes checkpoints is busy just when it matters.
#[derive(Default)]
pub struct Door {
    ways: Arc<Mutex<Ways>>,
    over: Arc<AtomicBool>,
}

fn lock(ways: &Mutex<Ways>) -> MutexGuard<'_, Ways> {
    ways.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Door {
    /// Watches the guest's interface, which is there.
    pub fn watch(init: &Init) -> anyhow::Result<Door> {
        let open = || -> anyhow::Result<PacketTap> {
            let link = Netlink::open()?.link(GUEST_LINK)?;
            Ok(PacketTap::open_door(link.index)?)
        };
        let tap = init.namespaces()?.run(open).context("enter the guest's network")??;
        let door = Door::default();
        let (ways, over) = (door.ways.clone(), door.over.clone());
        let watching = move || {
            while !over.load(Ordering::Relaxed) {
                match tap.next(LOOK_MS) {
                    Ok(Some(seen)) => {
                        let packet = Arc::new(seen.packet);
                        lock(&ways).retain(|_, way| way.offer(&packet));
                    }
                    Ok(None) => {}
                    // The interface was taken down for a moment (ENETDOWN).
                    Err(error) => {
                        tracing::debug!(%error, "packets at the door");
                        std::thread::sleep(Duration::from_millis(10));
                    }
                }
            }
        };
        std::thread::Builder::new().name("door".into()).spawn(watching)?;
        Ok(door)
    }

    /// Also tells this spare.
    pub fn tell(&self, node: NodeId, way: PacketSender) {
        lock(&self.ways).insert(node, way);
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}
