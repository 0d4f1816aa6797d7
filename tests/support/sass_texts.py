"""Machine code as cuobjdump prints it."""

WGMMA = """
.L_x_2:
        /*0100*/              @!P0 BRA `(.L_x_9) ;
        /*0110*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, !UPT ;
        /*0120*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR12], R24, gsb0 ;
        /*0130*/               @P1 BRA `(.L_x_2) ;
        /*0140*/                   LDS.128 R4, [R2] ;
.L_x_9:
        /*0150*/                   EXIT ;
"""
FFMA = """
        /*0000*/                   LDS.U.128 R0, [R9] ;
.L_3:
        /*0010*/                   LDS.64 R4, [R8] ;
        /*0020*/                   LDSM.16.MT88.4 R12, [R10+UR4] ;
        /*0030*/                   FFMA R5, R4, R6.reuse, R5 ;
        /*0040*/              @!PT FFMA.FTZ R5, R4, R6, R5 ;
        /*0050*/                   STL.64 [R1+0x8], R2 ;
        /*0060*/              @!P2 LDL.LU R3, [R1] ;
        /*0070*/               @P0 BRA `(.L_3) ;
"""
