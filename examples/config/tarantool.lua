-- A space in memory; what little is written goes to the directory that is named.
box.cfg {
    work_dir = arg[1],
    wal_mode = 'none',
    memtx_memory = 256 * 1024 * 1024,
    checkpoint_interval = 0,
}
-- The first space that a user makes has the number 512.
local store = box.schema.space.create('store', { if_not_exists = true })
store:create_index('primary', { type = 'hash', parts = { 1, 'string' }, if_not_exists = true })
box.schema.user.grant('guest', 'read,write', 'space', 'store', { if_not_exists = true })
-- Clients come when all is there.
box.cfg { listen = '0.0.0.0:3301' }
